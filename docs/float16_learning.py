"""Does float16 learn as bfloat16 does? The quickstart's task for 50 steps in each dtype, from several seeds.

    python docs/float16_learning.py FOLDER [--dtypes bfloat16,float16] [--seeds 0,1,2,3] [--at-once 1]

One process for each run; docs/t4.md's table, then the means. On a GPU, or on a CPU, where float16 takes 90 s a step.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

import colab_kit as kit
from colab_kit.demo import NOTEBOOK
from colab_kit.run import fifths


def quickstart() -> dict:
    """What the quickstart's own cells make: its dataset and its rewards."""
    import nbformat

    made = {"kit": kit}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code" and re.search(r"^(dataset = |def )", cell.source, re.MULTILINE):
            exec(cell.source, made)
    return made


def one(dtype: str, seed: int, options: argparse.Namespace) -> None:
    kit.enable_standby()
    settings = kit.presets.QUICKSTART.replace(
        dtype=dtype, seed=seed, max_steps=options.steps, save_minutes=None,
        model_name_or_path=options.model or kit.presets.QUICKSTART.model_name_or_path,
        output_dir=str(options.folder / f"{dtype}-{seed}"), gradient_checkpointing=True,
        vllm_gpu_memory_utilization=0.4 / options.at_once if options.at_once > 1 else None,
    )  # fmt: skip
    made = quickstart()
    rewards = [made["right_number"], made["brief"]]
    steps = kit.train(kit.load(settings), made["dataset"], rewards, settings).metrics
    print("RESULT " + json.dumps([step["reward"] for step in steps]), sum(step["skipped_steps"] for step in steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--seeds", default="0,1,2,3")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--model", help="instead of SmolLM2-135M")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]), options)
        return
    print("| dtype | seed | first fifth | last fifth | best ten steps in a row | second half | skipped steps |")
    print("|" + "---|" * 7)
    halves: dict[str, list[float]] = {}
    runs = [(dtype, seed) for seed in options.seeds.split(",") for dtype in options.dtypes.split(",")]

    def result(run: tuple[str, str]) -> str:
        command = [sys.executable, *sys.argv, "--one", *run]
        environment = os.environ | {"COLAB_KIT_DASHBOARD": "off"}
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    with ThreadPoolExecutor(options.at_once) as pool:
        for (dtype, seed), output in zip(runs, pool.map(result, runs), strict=True):
            found = next(line for line in output.splitlines() if line.startswith("RESULT "))
            rewards, end = json.JSONDecoder().raw_decode(found[7:])
            half = len(rewards) // 2
            best = max(mean(rewards[i : i + 10]) for i in range(len(rewards) - 9))
            halves.setdefault(dtype, []).append(mean(rewards[half:]))
            figures = *fifths(rewards), best, halves[dtype][-1]
            print(f"| {dtype} | {seed} | {' | '.join(f'{x:.3f}' for x in figures)} | {found[7 + end :].strip()} |")
            sys.stdout.flush()
    for dtype, values in halves.items():
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        print(f"{dtype}: mean of the second halves {mean(values):.3f} +- {error:.3f} (standard error)")


if __name__ == "__main__":
    main()
