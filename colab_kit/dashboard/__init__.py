"""The live dashboard: is it learning, when will it be done, how full is the memory, what did Standby save.

    report.py   the figures of a run, in memory and in `metrics.jsonl`
    text.py     figures as words: one line a step, the final figures
    svg.py      figures as drawings: lines, bars, ticks; strings in, strings out
    picture.py  progress, learning and memory as one HTML string
    completions.py  the latest completions as another
    png.py      the same as a PNG, for viewers that strip SVG
    live.py     the front end: a widget, or plain text, redrawn at most twice a second

Everything but live.py is pure: the same figures give the same strings. `python -m colab_kit.dashboard FOLDER`
draws a recorded run and times one frame.
"""

from .live import Dashboard
from .report import Report

__all__ = ["Dashboard", "Report"]
