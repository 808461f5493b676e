"""Does this very card do all that a run does? `kit.preflight("t4", deep=True)`, or

    python -m colab_kit.trial t4

One small engine (on a GPU: two layers of the preset's shapes, random weights, the preset's dtype and attention)
generates, sleeps, wakes and trains, in a process of its own, since there is one engine a process. Each check is printed
when it is done; the first that fails ends the trial with a text for a report.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator

from . import presets
from .presets import Settings

KINDS = {
    "t4": (presets.LLAMA31_8B_T4, "llama31_8b", {"num_hidden_layers": 2, "vocab_size": 512}),
    "a100": (presets.QWEN3_32B_A100, "qwen3_32b", {"num_hidden_layers": 2, "vocab_size": 512}),
    "cpu": (presets.QUICKSTART, "tiny_llama", {}),
}
CYCLES = 10
LEVEL_MIB = 64
"""growth over the cycles that is still level"""
SECONDS = 300
MARK = "TRIAL "


def trial(key: str, seconds: float = SECONDS) -> tuple[list[tuple[str, str, str]], str]:
    """Runs the checks in a fresh process and prints each: ([(what, found, problem or "")], text for a report or "")."""
    from .benchmark import process_of_its_own, versions

    environment, start = {"UNSLOTH_VLLM_STANDBY": "1"} | os.environ, time.monotonic()
    found, output = [], []
    with process_of_its_own(["colab_kit.trial", key], seconds, environment, subprocess.STDOUT) as process:
        for line in process.stdout:
            if line.startswith(MARK):
                found.append(tuple(json.loads(line[len(MARK) :])))
                print(f"{time.monotonic() - start:6.1f} s  {found[-1][0]}: {found[-1][2] or found[-1][1]}", flush=True)
            else:
                output.append(line)
        code = process.wait()
    if code and not any(problem for *_, problem in found):
        after = f"after {found[-1][0]!r}" if found else "at once"
        late = time.monotonic() - start >= seconds
        how = f"not done in {seconds:g} s" if late else f"signal {signal.Signals(-code).name}" if code < 0 else code
        found.append(("trial", f"ended {after}", f"{how}; its last words are in the report below"))
    if not any(problem for *_, problem in found):
        return found, ""
    from .preflight import read_gpu

    lines = [f"colab_kit trial {key!r} failed", versions(), str(read_gpu() or "no GPU")]
    lines += [f"{'FAILED' if problem else 'ok'}  {what}: {problem or text}" for what, text, problem in found]
    return found, "\n".join([*lines, "last words:", *(line.rstrip() for line in output[-40:])])


def checks(key: str, folder: str) -> Iterator[tuple[str, str, str]]:
    """(what, found, problem) one after the other; an exception is a failure of the check that did not come."""
    from . import enable_standby, load, train
    from .measure import alternating
    from .shapes import write_checkpoint

    enable_standby()
    import torch

    gpu, (preset, shape, changes) = torch.cuda.is_available(), KINDS[key]
    settings: Settings = preset.replace(
        model_name_or_path=str(write_checkpoint(shape, f"{folder}/model", **changes)), max_prompt_length=64,
        max_completion_length=32, max_steps=1, save_minutes=None, log_completions=False, reward_weights=None,
        output_dir=f"{folder}/out", vllm_gpu_memory_utilization=0.5 if gpu else None,
    )  # fmt: skip
    rows = [{"prompt": " ".join(f"w{i * j % 500 + 2}" for j in range(1, 40))} for i in range(1, 9)]
    start = time.perf_counter()
    policy = load(settings)
    engine, standby = policy.engine, policy.standby
    attention = settings.vllm_attention_backend or "vLLM's own choice of attention"
    yield "engine", f"{time.perf_counter() - start:.0f} s, {engine.dtype}, {attention}", ""

    prompts = [[5 + i * j % 300 for i in range(48)] for j in range(1, 5)]

    def greedy() -> list[list[int]]:
        with standby.awake():  # raises where log-probabilities are not finite
            groups = engine.generate(prompts, temperature=0, lora_request=policy.slot.request, ignore_eos=True)
        return [group[0].token_ids for group in groups]

    tokens = greedy()
    yield "generating", f"{sum(map(len, tokens))} tokens", ""

    standby.wake()
    freed, held = standby.sleep(), standby.kv_cache_bytes
    words = f"{freed / 2**30:.2f} of {held / 2**30:.2f} GiB came free in {1e3 * standby.sleep_seconds:.0f} ms"
    short = standby.enabled and freed < 0.95 * held
    yield "sleep", words if standby.enabled else NOT_HERE, f"only {words}, by the driver" if short else ""

    same = greedy() == tokens
    found = f"{1e3 * standby.wake_seconds:.0f} ms, the same greedy tokens"
    yield "wake", found, "" if same else "greedy tokens are others after a cycle"

    before = [p.detach().clone() for p in policy.model.parameters() if p.requires_grad]
    step = train(policy, rows, [alternating], settings).metrics[0]
    after = [p for p in policy.model.parameters() if p.requires_grad]
    wrong = "" if math.isfinite(step["loss"]) else "the loss is not finite"
    if not wrong and not step["skipped_steps"] and all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        wrong = "the adapter did not change"
    yield "training step", f"loss {step['loss']:.4f}, gradient {step['grad_norm']:.3g}", wrong

    free = []
    for _ in range(CYCLES):
        train(policy, rows, [alternating], settings)
        free.append(engine.free_bytes())
    grown = (free[0] - free[-1]) / 2**20
    found = f"memory level within {abs(grown):.0f} MiB" if gpu else NOT_HERE
    yield f"{CYCLES} cycles", found, f"memory grew by {grown:.0f} MiB" if grown > LEVEL_MIB else ""


NOT_HERE = "done; whether memory came back: not applicable without a GPU and UNSLOTH_VLLM_STANDBY=1"


def main(key: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        names = iter(("engine", "generating", "sleep", "wake", "training step", f"{CYCLES} cycles"))
        try:
            for row in checks(key, folder):
                print(MARK + json.dumps(row), flush=True)
                next(names)
                if row[2]:
                    return 1
        except Exception as error:
            traceback.print_exc()
            words = (str(error).strip() or type(error).__name__).splitlines()
            print("\n" + MARK + json.dumps((next(names), "", f"{type(error).__name__}: {words[-1][:300]}")), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
