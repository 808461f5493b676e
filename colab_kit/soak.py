"""Train for minutes while things go wrong, and check after each that nothing was lost and that memory is level.

    python -m colab_kit.soak --minutes 2 [--model FOLDER] [--completion TOKENS] [--seed N]

One run is resumed over and over, with prompts and completions of random lengths. Each cycle one fault strikes: a reward
function that raises or returns NaN, a callback that raises, the stop button at a random moment, a disk that fails, a
checkpoint with a changed byte, a process killed (SIGKILL) while it saves. Without --model a tiny random one is made.
Ends with a table, and with exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .presets import Settings
from .standby import enable_standby

STEPS = 3
"""a cycle, if nothing goes wrong"""
LEVEL_MIB = 64
"""growth of memory, first to last quarter of the cycles, that is still level"""
FAULTS = (
    "none",
    "reward raises",
    "NaN reward",
    "callback raises",
    "interrupt",
    "failed write",
    "changed byte",
    "kill -9",
)
WRITER = """
import sys, itertools
from pathlib import Path
from colab_kit import checkpoint
source, folder = map(Path, sys.argv[1:])
content = {name: (source / name).read_bytes() for name in checkpoint.FILES}
for step in itertools.count(1):
    checkpoint.write(folder, step, content)
    print(step, flush=True)
"""


class Soak:
    def __init__(self, policy: Any, folder: Path, seed: int) -> None:
        self.policy, self.folder, self.rng = policy, folder, random.Random(seed)
        self.settings: Settings = policy.settings
        self.rows = [
            {"prompt": " ".join(f"w{self.rng.randrange(500)}" for _ in range(self.rng.randrange(1, 20)))}
            for _ in range(64)
        ]
        self.step = self.at = 0
        self.done: int | None = None  # steps of the last run, where it is known
        self.seconds = 1.0  # of a cycle, so that interrupts come anywhere in it
        self.struck: Counter[str] = Counter()
        self.failures: list[str] = []
        self.memory: list[float] = []

    def cycle(self, fault: str) -> None:
        """Some steps with one fault, then the checks."""
        from . import checkpoint

        self.fault, self.at = fault, self.step + self.rng.randint(1, STEPS)
        longest = self.settings.max_completion_length
        settings = self.settings.replace(
            max_steps=self.step + STEPS, max_completion_length=self.rng.randint(max(1, longest // 4), longest)
        )
        expected = self.step
        if fault == "changed byte" and self.step:
            expected = self.change_byte()
        if fault == "kill -9" and self.step:
            self.kill_writer()
        timer = threading.Timer(self.rng.random() * self.seconds, os.kill, (os.getpid(), signal.SIGINT))
        real, start, status, self.done = checkpoint.files, time.monotonic(), "outside", None
        try:
            if fault == "failed write":
                checkpoint.files = FailingFiles(self)
            if fault == "interrupt":
                timer.start()
            status = self.train(settings)
        except KeyboardInterrupt:  # it came before the first step or after the last
            self.struck[fault] += 1
        finally:
            checkpoint.files = real
            try:
                timer.cancel()
                if timer.ident:
                    timer.join()
            except KeyboardInterrupt:
                pass
        if fault == "none":
            self.seconds = time.monotonic() - start
        self.struck[fault] += fault == "none" or status == "interrupted"
        self.check(fault, expected)

    def train(self, settings: Settings) -> str:
        from .trainer import train

        try:
            run = train(self.policy, self.rows, self.reward, settings, callbacks=[Trouble(self)], resume=self.step > 0)
            self.done = run.report.step
            return run.status
        except Exception as error:
            if "soak" not in str(error) and "NaN" not in str(error) and "nan" not in str(error):
                raise
            self.struck[self.fault] += 1
            return "failed"

    def reward(self, completion_ids, trainer_state, **_):
        if trainer_state.global_step + 1 == self.at and self.fault == "reward raises":
            raise RuntimeError("soak: the reward function raises")
        rewards = [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
        if trainer_state.global_step + 1 == self.at and self.fault == "NaN reward":
            rewards[self.rng.randrange(len(rewards))] = float("nan")
        return rewards

    def change_byte(self) -> int:
        """Spoils the newest checkpoint; returns the step of the one before."""
        from .checkpoint import FILES, folders

        newest = folders(self.settings.output_dir)[-1]
        file = newest / self.rng.choice(FILES)
        data = bytearray(file.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        file.write_bytes(data)
        self.struck["changed byte"] += 1
        before = folders(self.settings.output_dir)[:-1]
        return int(before[-1].name[11:]) if before else 0

    def kill_writer(self) -> None:
        """Kills another process while it saves this run's newest checkpoint over and over."""
        from .checkpoint import folders, read

        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            source = folders(self.settings.output_dir)[-1]
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, source, place],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            finished = [int(child.stdout.readline())]
            time.sleep(self.rng.random() * 0.1)
            child.kill()
            finished += [int(line) for line in child.stdout.read().split()]
            child.wait()
            present = [int(read(folder).folder.name[11:]) for folder in folders(place)]  # raises for one that is torn
            self.require(set(finished) <= set(present), f"kill -9 lost {set(finished) - set(present)}")
            self.struck["kill -9"] += 1

    def check(self, fault: str, expected: int) -> None:
        import gc

        from . import checkpoint
        from .dashboard import Report

        policy = self.policy
        self.require(not policy.standby.is_awake, "the engine is awake")
        self.require(not policy.engine.core.scheduler.has_requests(), "the engine is not idle")
        self.require(all(p.grad is None for p in policy.model.parameters()), "gradients were kept")
        found = checkpoint.find(True, self.settings.output_dir)
        step = found.step if found else 0
        self.require(step >= expected, f"step {step} is behind step {expected}, which was saved")
        self.require(fault == "failed write" or self.done in (None, step), f"step {step} was saved of {self.done}")
        if found and self.done in (None, step) and fault != "changed byte":
            from peft import get_peft_model_state_dict

            mine = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
            equal = all(bool((mine[key].cpu() == value).all()) for key, value in found.adapter.items())
            self.require(equal, "the adapter in memory is not the one that was saved")
            steps = [row["step"] for row in Report.load(self.settings.output_dir).steps]
            self.require(steps[:step] == list(range(1, step + 1)), f"figures of {len(steps)} steps for {step}")
        del found
        gc.collect()
        self.memory.append(used_mib(policy))
        self.failures = [f if ":" in f else f"cycle {len(self.memory)}, {fault}: {f}" for f in self.failures]
        self.step = step

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)

    def drift(self) -> float:
        """MiB, from the median of the first quarter of the cycles to that of the last; the first two warm up."""
        values = self.memory[2:]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(values[:quarter]) if values else 0.0


def FailingFiles(soak: Soak) -> Any:
    """A disk that fails one change in eight."""
    from .checkpoint import Files

    class Failing(Files):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_") and soak.rng.random() < 1 / 8:
                soak.struck["failed write"] += 1
                raise OSError(28, "No space left on device (soak)")
            return super().__getattribute__(name)

    return Failing()


class Trouble:
    """A callback that raises when it is its turn."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **_: self.event(name, state)

    def event(self, name: str, state: Any) -> None:
        if self.soak.fault == "callback raises" and name == "on_step_end" and state.global_step == self.soak.at:
            raise RuntimeError("soak: the callback raises")


def used_mib(policy: Any) -> float:
    """On a GPU what the driver says is used; else this process's resident memory."""
    if policy.device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    import psutil

    return psutil.Process().memory_info().rss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--model", help="a folder or a hub name; without it, a tiny random one")
    parser.add_argument("--completion", type=int, default=16, help="tokens, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("COLAB_KIT_DASHBOARD", "off")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    enable_standby()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = options.model
        if not model:
            from .shapes import write_checkpoint

            model = str(write_checkpoint("tiny_llama", folder / "model"))
        settings = Settings(
            model_name_or_path=model, num_generations=4, per_device_train_batch_size=8, max_prompt_length=112,
            max_completion_length=options.completion, lora_r=8, save_steps=1, save_total_limit=3,
            output_dir=str(folder / "run"), max_steps=1,
        )  # fmt: skip
        from .policy import load

        policy = load(settings)
        soak, deadline = Soak(policy, folder, options.seed), time.monotonic() + 60 * options.minutes
        turns = list(FAULTS)
        while time.monotonic() < deadline or turns:
            soak.cycle(turns.pop(0) if turns else soak.rng.choice(FAULTS))
        return report(soak)


def report(soak: Soak) -> int:
    drift, cycles = soak.drift(), len(soak.memory)
    soak.require(abs(drift) <= LEVEL_MIB or drift < 0, f"memory grew by {drift:.0f} MiB")
    print(f"\n{'fault':<18} struck")
    for fault in FAULTS:
        print(f"{fault:<18} {soak.struck[fault]:>6}")
        soak.require(fault == "none" or soak.struck[fault] > 0, f"{fault} never struck")
    print(f"\n{cycles} cycles, {soak.step} steps; memory {soak.memory[-1]:,.0f} MiB, drift {drift:+.1f} MiB")
    print("\n".join(soak.failures) or "nothing lost")
    print(json.dumps({"cycles": cycles, "steps": soak.step, "drift_mib": round(drift, 1), "failures": soak.failures}))
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
