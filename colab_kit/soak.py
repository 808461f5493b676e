"""Train for minutes while things go wrong, and check after each that nothing was lost and that memory is level.

    python -m colab_kit.soak --minutes 2
    python -m colab_kit.soak --minutes 20 --model llama31_8b --card 14.56 --dtype float16 --attention TRITON_ATTN \\
        --sdpa efficient --rank 32 --prompt 512 --completion 256

One run is resumed over and over, with prompts and completions of random lengths. Each cycle one fault strikes: a reward
function that raises or returns NaN, a callback that raises, the stop button at a random moment, a disk that fails, a
checkpoint with a changed byte, a process killed (SIGKILL) while it saves; on a GPU also a reward function that takes
the card's free memory. Ends with a table, a line of JSON, and exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from .dashboard import Report
from .presets import Settings
from .standby import enable_standby

STEPS = 3
"""a cycle, if nothing goes wrong"""
LEVEL_MIB = {"cuda": 32, "cpu": 64}
"""growth of the idle memory, first to last quarter of the cycles, that is still level"""
FAULTS = "none|reward raises|NaN reward|callback raises|interrupt|failed write|changed byte|kill -9".split("|")
WRITER = """
import sys, itertools
from pathlib import Path
from colab_kit import checkpoint
source, folder = map(Path, sys.argv[1:3])
content = {name: (source / name).read_bytes() for name in checkpoint.FILES}
for step in itertools.count(int(sys.argv[3])):
    checkpoint.write(folder, step, content)
    print(step, flush=True)
"""


class Soak:
    def __init__(self, policy: Any, folder: Path, seed: int) -> None:
        from . import checkpoint

        self.policy, self.folder, self.rng, self.checkpoint = policy, folder, random.Random(seed), checkpoint
        self.settings: Settings = policy.settings
        lengths = [self.rng.randint(1, self.settings.max_prompt_length - 1) for _ in range(64)]  # and a token of BOS
        self.rows = [{"prompt": " ".join(f"w{self.rng.randrange(400)}" for _ in range(n))} for n in lengths]
        self.faults = FAULTS + ["out of memory"] * (policy.device.type == "cuda")
        self.step = self.at = 0
        self.done: int | None = None  # steps of the last run, where it is known
        self.hoard: Any = None  # tensors of the user's own
        self.seconds = 1.0  # of a cycle, so that interrupts come anywhere in it
        self.struck, self.failures = Counter(), []
        self.memory, self.host = [], []  # MiB when idle, a value a cycle
        self.began = time.monotonic()

    def one(self, fault: str) -> None:
        """A cycle, and a line about it; all that the kit said, if it went wrong."""
        said, failures, status = io.StringIO(), len(self.failures), "broken off"
        try:
            with contextlib.redirect_stdout(said):
                status = self.cycle(fault)
        finally:
            if status == "broken off" or len(self.failures) > failures:
                print(said.getvalue())
        print(
            f"{time.monotonic() - self.began:6.0f} s  cycle {len(self.memory)}: {fault}, {status}; step {self.step}, "
            f"{self.memory[-1]:,.0f} MiB, host {self.host[-1]:,.0f} MiB, {len(self.failures)} failures",
            flush=True,
        )

    def cycle(self, fault: str) -> str:
        """Some steps with one fault, then the checks. Returns how the run ended."""
        checkpoint = self.checkpoint
        self.fault, self.at = fault, self.step + self.rng.randint(1, STEPS)
        longest = self.settings.max_completion_length
        settings = self.settings.replace(
            max_steps=self.step + STEPS, max_completion_length=self.rng.randint(max(1, longest // 4), longest)
        )
        expected = self.change_byte() if fault == "changed byte" and self.step else self.step
        if fault == "kill -9" and self.step:
            self.kill_writer()
        timer = threading.Timer(self.rng.random() * self.seconds, os.kill, (os.getpid(), signal.SIGINT))
        real, start, status, self.done = checkpoint.files, time.monotonic(), "interrupted outside", None
        try:
            if fault == "failed write":
                checkpoint.files = failing_files(self)
            if fault == "interrupt":
                timer.start()
            status = self.train(settings)
        except KeyboardInterrupt:  # it came before the first step or after the last
            self.struck[fault] += 1
        finally:
            checkpoint.files, self.hoard = real, None
            with contextlib.suppress(KeyboardInterrupt):
                timer.cancel()
                if timer.ident:
                    timer.join()
        if fault == "none":
            self.seconds = time.monotonic() - start
        self.struck[fault] += fault == "none" or status == "interrupted"
        self.check(fault, expected)
        return status

    def train(self, settings: Settings) -> str:
        from .trainer import train

        try:
            run = train(self.policy, self.rows, self.reward, settings, callbacks=[trouble(self)], resume=self.step > 0)
            self.done = run.report.step
            return run.status
        except Exception as error:
            known = {"NaN reward": "nan", "out of memory": "out of gpu memory"}.get(self.fault, "soak:")
            if known in str(error).lower():
                self.struck[self.fault] += 1
            else:
                traceback.print_exc()
                self.require(False, f"{type(error).__name__}: {error}")
            return "failed"

    def reward(self, completion_ids, trainer_state, **_):
        fault = self.fault if trainer_state.global_step + 1 == self.at else "none"
        if fault == "reward raises":
            raise RuntimeError("soak: the reward function raises")
        if fault == "out of memory":
            import torch

            self.hoard = torch.empty(self.policy.engine.free_bytes() - 2**24, dtype=torch.uint8, device="cuda")
        rewards = [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
        if fault == "NaN reward":
            rewards[self.rng.randrange(len(rewards))] = float("nan")
        return rewards

    def change_byte(self) -> int:
        """Spoils the newest checkpoint; returns the step of the one before."""
        *before, newest = self.checkpoint.folders(self.settings.output_dir)
        file = newest / self.rng.choice(self.checkpoint.FILES)
        data = bytearray(file.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        file.write_bytes(data)
        self.struck["changed byte"] += 1
        return int(before[-1].name[11:]) if before else 0

    def kill_writer(self) -> None:
        """Kills another process while it saves this run's newest checkpoint over and over."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            source = self.checkpoint.folders(self.settings.output_dir)[-1]
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, source, place, "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # it writes files only
            )  # fmt: skip
            finished = [int(child.stdout.readline())]
            time.sleep(self.rng.random() * 0.1)
            child.kill()
            finished += [int(line) for line in child.stdout.read().split()]
            child.wait()
            present = self.checkpoint.folders(place)
            lost = set(finished) - {int(self.checkpoint.read(folder).folder.name[11:]) for folder in present}
            self.require(not lost, f"kill -9 lost {lost}")  # `read` raises for one that is torn
            self.struck["kill -9"] += 1

    def check(self, fault: str, expected: int) -> None:
        policy = self.policy
        self.require(not policy.standby.is_awake, "the engine is awake")
        self.require(not policy.engine.core.scheduler.has_requests(), "the engine is not idle")
        self.require(all(p.grad is None for p in policy.model.parameters()), "gradients were kept")
        found = self.checkpoint.find(True, self.settings.output_dir)
        step = found.step if found else 0
        self.require(step >= expected, f"step {step} is behind step {expected}, which was saved")
        self.require(fault == "failed write" or self.done in (None, step), f"step {step} was saved of {self.done}")
        if found and self.done in (None, step) and fault != "changed byte":
            from peft import get_peft_model_state_dict

            mine = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
            equal = all(mine[key].cpu().equal(value) for key, value in found.adapter.items())
            self.require(equal, "the adapter in memory is not the one that was saved")
            steps = [row["step"] for row in Report.load(self.settings.output_dir).steps]
            self.require(steps[:step] == list(range(1, step + 1)), f"figures of {len(steps)} steps for {step}")
        del found
        gc.collect()
        for aside in Path(self.settings.output_dir).glob("earlier-*"):  # what a changed byte left: disk
            shutil.rmtree(aside)
        self.host.append(psutil.Process().memory_info().rss / 2**20)
        self.memory.append(self.host[-1])
        if policy.ledger:  # this process's own, by the driver
            policy.engine.give_back_cached_blocks()
            self.memory[-1] = policy.ledger.sample() / 2**20
        self.step = step

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(f"cycle {len(self.memory) + 1}, {self.fault}: {what}")


def drift(memory: list[float]) -> float:
    """From the median of the first quarter of the cycles to that of the last; the first two warm up."""
    values = memory[2:]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter]) if values else 0.0


def failing_files(soak: Soak) -> Any:
    """A disk that fails one change in eight."""

    class Failing(soak.checkpoint.Files):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_") and soak.rng.random() < 1 / 8:
                soak.struck["failed write"] += 1
                raise OSError(28, "No space left on device (soak)")
            return super().__getattribute__(name)

    return Failing()


def trouble(soak: Soak) -> Any:
    """A callback that raises when it is its turn."""
    from transformers import TrainerCallback

    class Trouble(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if soak.fault == "callback raises" and state.global_step == soak.at:
                raise RuntimeError("soak: the callback raises")

    return Trouble()


def main() -> int:
    from .benchmark import add_engine_arguments, random_model, smaller_card

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, model="tiny_llama", rank=8)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--prompt", type=int, default=20, help="tokens, at most")
    parser.add_argument("--completion", type=int, default=16, help="tokens, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("COLAB_KIT_DASHBOARD", "off")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    enable_standby()
    model = random_model(options.model, options.work, options.sixteen)
    with tempfile.TemporaryDirectory() as place, smaller_card(options.card):
        settings = Settings(
            model_name_or_path=model, load_in_4bit=not options.sixteen, dtype=options.dtype,
            vllm_attention_backend=options.attention, sdpa_backend=options.sdpa, lora_r=options.rank,
            num_generations=4, per_device_train_batch_size=8, max_prompt_length=options.prompt,
            max_completion_length=options.completion, save_steps=1, save_total_limit=3,
            output_dir=str(Path(place) / "run"), max_steps=1,
        )  # fmt: skip
        from .policy import load

        soak = Soak(load(settings), Path(place), options.seed)
        turns = ["none", *soak.faults]  # the first warms up
        while time.monotonic() < soak.began + 60 * options.minutes or turns:
            missing = [fault for fault in soak.faults if not soak.struck[fault]]
            soak.one(turns.pop(0) if turns else soak.rng.choice(missing or soak.faults))
        return report(soak, options)


def report(soak: Soak, options: argparse.Namespace) -> int:
    grown, host, level = drift(soak.memory), drift(soak.host), LEVEL_MIB[soak.policy.device.type]
    cycles, soak.fault = len(soak.memory), "at the end"
    soak.require(grown <= level, f"memory grew by {grown:.0f} MiB, more than {level}")
    print(f"\n{'fault':<18} struck")
    for fault in soak.faults:
        print(f"{fault:<18} {soak.struck[fault]:>6}")
        soak.require(soak.struck[fault] > 0, f"{fault} never struck")
    print(
        f"\n{cycles} cycles, {soak.step} steps; {soak.memory[-1]:,.0f} MiB, drift {grown:+.1f} (host {host:+.1f}) MiB"
    )
    print("\n".join(soak.failures) or "nothing lost")
    figures = {
        "model": options.model, "card": options.card, "minutes": round((time.monotonic() - soak.began) / 60, 1),
        "cycles": cycles, "steps": soak.step, "struck": dict(soak.struck), "failures": soak.failures,
        "drift_mib": round(grown, 1), "host_drift_mib": round(host, 1),
        "memory_mib": [round(value) for value in soak.memory],
    }  # fmt: skip
    print(json.dumps(figures), flush=True)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
