"""A notebook's own cells, run from top to bottom on a machine without a network, and kept with their outputs.

    python docs/execute_notebook.py notebooks/llama31_8b_qlora_t4.ipynb --shape llama31_8b --card 14.56 \\
        --set max_steps=4 more_steps=1 --without "kit.install()" "machine.require()" --out executed

A form's fields are filled in by `--set`, as a user would; nothing else in a cell is changed. `--shape` writes random
weights of a real model's shape and puts their folder into the field `model`. GSM8K is a folder of rows of its form,
whose prompts are `--prompt-tokens` long: memory and speed depend on lengths, not on words. Random weights hardly ever
end a completion, so all have their full length: the worst case. `--card` leaves so many GiB of the card. `--without`
leaves out whole lines, for a machine that is another than the notebook asks for; what was set and left out is printed.
With COLAB_KIT_CI=1, `--shape` is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from colab_kit.benchmark import WORK, random_model, smaller_card, versions
from colab_kit.data import SYSTEM_PROMPT
from colab_kit.shapes import SHAPES, write_tokenizer

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
FIGURES = (
    "step", "reward", "grad_norm", "completions/mean_length", "completions/clipped_ratio", "step_time",
    "time/generating", "time/training", "memory/peak_gib", "memory/awake_gib", "memory/asleep_gib",
    "memory/kv_cache_gib",
)  # fmt: skip


def fill_in(notebook: nbformat.NotebookNode, values: dict[str, str], left_out: list[str]) -> list[str]:
    """Set form fields (`name = value  # @param ...`) and take out whole lines; returns what was done, in words.

    Raises: ValueError for a field or a line that no cell has.
    """
    done = []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for name, value in values.items():
        pattern, found = re.compile(rf"^{name} = .+?(?=  # @param)", re.MULTILINE), 0
        for cell in cells:
            cell.source, count = pattern.subn(lambda _, line=f"{name} = {value}": line, cell.source)
            found += count
        if found != 1:
            raise ValueError(f"--set {name}: {found} fields of a form have this name")
        done.append(f"{name} = {value}")
    for text in left_out:
        pattern, found = re.compile(rf"^{re.escape(text)}.*$", re.MULTILINE), 0
        for cell in cells:
            cell.source, count = pattern.subn(lambda match: f"# left out on this machine: {match[0]}", cell.source)
            found += count
        if not found:
            raise ValueError(f"--without {text!r}: no line begins so")
        done.append(f"left out: {text}")
    return done


def write_model(shape: str, folder: Path, weights: Path, period: int) -> Path:
    """A model folder over the random `weights`, with a tokenizer of its own.

    One word in `period` holds each of the tags that the notebooks' rewards count: else all completions earned the same
    and no gradient would flow.
    """
    folder.mkdir(parents=True)
    for file in weights.iterdir():
        if "token" not in file.name and file.suffix != ".jinja":
            (folder / file.name).symlink_to(file)
    size = SHAPES[shape]["vocab_size"] - 2
    words = [(TAGS[i % period] if i % period < len(TAGS) else "") + f"w{i}" for i in range(size)]
    write_tokenizer(folder, SHAPES[shape]["vocab_size"], words)
    return folder


def write_gsm8k(folder: Path, prompt_tokens: int, rows: int = 256) -> None:
    """Rows of GSM8K's form, where `load_dataset("openai/gsm8k", "main")` finds them: below the kernel's folder."""
    words = prompt_tokens - len(SYSTEM_PROMPT.split()) - 2
    if words < 1:
        raise ValueError(f"--prompt-tokens {prompt_tokens} is less than the notebooks' system prompt")
    folder.mkdir(parents=True)
    files = {"train": rows, "test": rows // 4}
    card = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in files)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{card}---\n")
    for split, count in files.items():
        lines = []
        for i in range(count):
            question = " ".join(f"w{10 + (i * 31 + j * 7) % 400}" for j in range(words))
            lines.append(json.dumps({"question": question, "answer": f"as said #### {i % 90 + 10}"}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


class Client(NotebookClient):
    """Passes on what a cell prints, long lines cut."""

    def process_message(self, message, cell, index):
        if message["msg_type"] == "stream":
            for line in message["content"]["text"].splitlines(keepends=True):
                sys.stdout.write(line if len(line) <= 240 else line[:240] + " ...\n")
            sys.stdout.flush()
        return super().process_message(message, cell, index)


def seconds(cell: nbformat.NotebookNode) -> float:
    """That a cell took, by the kernel's own messages."""
    from datetime import datetime

    times = cell.metadata.get("execution", {})
    began, ended = (times.get(f"iopub.status.{state}") for state in ("busy", "idle"))
    if not (began and ended):
        return 0.0
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


def summary(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """The slow cells, and each step's figures from the run's own metrics.jsonl."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and seconds(cell) >= 2:
            print(f"cell {number}: {seconds(cell):.1f} s  {cell.source.splitlines()[0][:80]}")
    for file in sorted(folder.rglob("metrics.jsonl")):
        if "checkpoint-" in str(file):
            continue
        for row in map(json.loads, file.read_text().splitlines()):
            if "step" in row:
                print("RESULT", json.dumps({name: round(row[name], 3) for name in FIGURES if name in row}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, default=Path("executed"), help="folder for the executed notebook")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in the place of the model")
    parser.add_argument("--work", default=WORK, help="where they are kept for the next time")
    parser.add_argument("--card", type=float, help="GiB of the card to emulate")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the form, as Python")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="LINE", help="lines to leave out, by how they begin"
    )
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--period", type=int, default=1000, help="one word in so many holds each tag")
    parser.add_argument("--cell-timeout", type=int, default=900, help="seconds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # what ran until then is still written
    notebook = nbformat.read(options.notebook, as_version=4)
    values = dict(pair.split("=", 1) for pair in options.set)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.shape:
            weights = Path(random_model(options.shape, options.work))
            model = write_model(options.shape, folder / "model", weights, options.period)
            write_gsm8k(folder / "openai" / "gsm8k", options.prompt_tokens)
            values["model"] = repr(model.name)
        print("\n".join([options.notebook.name, versions(), *fill_in(notebook, values, options.without)]), flush=True)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        client = Client(
            notebook, timeout=options.cell_timeout, kernel_name="python3", resources={"metadata": {"path": name}}
        )
        try:
            with smaller_card(options.card):
                client.execute()
            print(f"{options.notebook.name}: every cell ran")
        finally:
            options.out.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, options.out / options.notebook.name)
            summary(notebook, folder)
            print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
