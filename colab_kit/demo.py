"""The quickstart notebook, executed in the terminal: `make demo`.

python -m colab_kit.demo               run notebooks/quickstart.ipynb, show its progress, save it as HTML
python -m colab_kit.demo --seeds 3     run it for several seeds and print how far each one's reward rose
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from pathlib import Path

from .dashboard import Report, text
from .presets import Settings
from .run import fifths

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def execute(notebook, folder: Path, echo: bool = True) -> None:
    """Run the notebook's cells in `folder`, a kernel of its own; what cells print appears as it comes."""
    from nbclient import NotebookClient

    class Client(NotebookClient):
        def process_message(self, message, cell, cell_index):
            if echo and message["msg_type"] == "stream":
                sys.stdout.write(message["content"]["text"])
                sys.stdout.flush()
            return super().process_message(message, cell, cell_index)

    client = Client(
        notebook,
        timeout=1800,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # its warning about open ports is for kernels of other machines
        resources={"metadata": {"path": str(folder)}},
    )
    stop = threading.Event()
    follower = threading.Thread(target=follow, args=(folder / "outputs/quickstart", stop), daemon=True)
    if echo:
        follower.start()
    try:
        client.execute()
    finally:
        stop.set()


def follow(run_folder: Path, stop: threading.Event) -> None:
    """Print a line for each step that a run adds to its metrics.jsonl: in the notebook they go to a widget."""
    shown, started = 0, time.time()
    while not stop.wait(0.5):
        file = run_folder / "metrics.jsonl"
        if not file.exists() or file.stat().st_mtime < started:
            continue
        report = Report.load(run_folder)
        if report.step > shown:
            shown = report.step
            print(text.line(report), flush=True)


def result(notebook, name: str) -> str:
    """The plain text that the cell ending in `name` shows."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.rstrip().endswith(name):
            return "\n".join(output.data["text/plain"] for output in cell.outputs if "data" in output)
    raise LookupError(f"no cell of the notebook ends in {name!r}")


def run_once(seed: int | None, folder: Path, echo: bool = True):
    """The executed notebook, its Report, and the seconds it took."""
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if seed is not None:
        for cell in notebook.cells:
            cell.source = re.sub(r"^seed = \d+", f"seed = {seed}", cell.source, flags=re.MULTILINE)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    execute(notebook, folder, echo)
    return notebook, Report.load(folder / "outputs/quickstart"), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0, help="run so many seeds and print each one's rise")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    options = parser.parse_args()
    if options.seeds:
        print(f"{'seed':>6} {'first fifth':>12} {'last fifth':>11} {'rise':>6} {'seconds':>8}   (reward from 0 to 1)")
        for seed in range(options.seeds):
            _, report, seconds = run_once(seed, options.out / f"seed-{seed}", echo=False)
            first, last = fifths(report.finite("reward"))
            print(f"{seed:>6} {first:>12.3f} {last:>11.3f} {last - first:>+6.3f} {seconds:>8.0f}", flush=True)
        return
    print(f"Running {NOTEBOOK.name} with {Settings().model_name_or_path}: about four minutes on two cores.\n")
    notebook, report, seconds = run_once(None, options.out)
    from nbconvert import HTMLExporter

    page = options.out / "quickstart.html"
    page.write_text(HTMLExporter().from_notebook_node(notebook)[0])
    print("\nThe same questions, before and after:\n")
    print(result(notebook, "comparison"))
    first, last = fifths(report.finite("reward"))
    print(f"Mean reward of the first fifth of the steps {first:.3f}, of the last fifth {last:.3f} (from 0 to 1).")
    print(f"{seconds:.0f} s. The executed notebook: {page}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
