"""`python -m colab_kit.dashboard FOLDER`: draws a recorded run, and times one frame.

python -m colab_kit.dashboard outputs                       the final figures, as text
python -m colab_kit.dashboard outputs --html report.html    the picture, as a page of its own
python -m colab_kit.dashboard outputs --time                median milliseconds of one live frame
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from . import picture, text
from .completions import completions
from .live import bundle
from .report import Report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m colab_kit.dashboard", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="the output_dir of a run, or its metrics.jsonl")
    parser.add_argument("--html", metavar="FILE", help="write the picture as a page")
    parser.add_argument("--png", metavar="FILE", help="write the picture as a PNG (needs Pillow)")
    parser.add_argument("--time", action="store_true", help="time one live frame")
    options = parser.parse_args()
    report = Report.load(options.folder)
    print(text.final(report))
    if options.html:
        page = f'<!doctype html><meta charset="utf-8"><title>{text.status(report)}</title>'
        page += '<meta name="color-scheme" content="light dark">' + bundle(report)["text/html"]
        Path(options.html).write_text(page, encoding="utf-8")
    if options.png:
        import base64

        from . import png

        Path(options.png).write_bytes(base64.b64decode(png.draw(report)))
    if options.time:
        times = []
        for _ in range(200):
            began = time.perf_counter()
            html = picture.figures(report, picture.Now("generating", 3, 16, "completions", 1.0))
            html += completions(report)
            times.append(1000 * (time.perf_counter() - began))
        print(f"one frame: {statistics.median(times):.2f} ms (median of {len(times)}), {len(html) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
