"""The front end: two core widgets in a notebook, plain text elsewhere, one ordinary output at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from . import picture, text
from .completions import completions
from .report import Report, clean

MOST_REDRAWS = 2  # a second
WINDOW = 1.0  # seconds


class Dashboard:
    """Shows a run while it goes on. Use it as a context manager around the training loop:

        with Dashboard(report) as dash:
            dash.phase("generating")
            dash.progress(3, 16, "completions")
            dash.step(1, {"reward": 0.1, ...})

    Leaving the block ends the report as done, interrupted (KeyboardInterrupt) or failed; exceptions pass on. The
    widgets are then replaced, in place, by an ordinary output that survives saving. All calls are cheap: the picture
    is redrawn at most twice a second, and only from the thread that opened the dashboard (Colab ignores the
    others). A fault in drawing never ends a run: it is printed once, and the dashboard goes on as text.

    `mode` is "widget", "text" or "off"; None: the environment's COLAB_KIT_DASHBOARD, else a widget in a notebook and
    text elsewhere. `clock` gives seconds.
    """

    def __init__(
        self,
        report: Report,
        *,
        mode: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], Any] | None = None,
    ) -> None:
        self.report, self.mode = report, mode or os.environ.get("COLAB_KIT_DASHBOARD") or best_mode()
        if self.mode not in ("widget", "text", "off"):
            raise ValueError(f"COLAB_KIT_DASHBOARD={self.mode!r} is not one of widget, text, off")
        self.redraws = 0
        self._clock, self._write = clock, write or _print
        self._now = picture.Now()
        self._step_began = clock()
        self._drawn: deque[float] = deque(maxlen=MOST_REDRAWS)
        self._drawn_progress = -WINDOW
        self._thread = threading.get_ident()
        self._learned = (-1, "")  # steps and their drawing: nearly all of a frame, and the same until the next step
        self._front: _Widgets | None = None
        self._faulty: _Widgets | None = None  # no longer drawn, but still to be replaced at the end

    def __enter__(self) -> Dashboard:
        self._thread = threading.get_ident()
        self._step_began = self._clock()
        if self.mode == "widget":
            try:
                self._front = _Widgets()
            except Exception as error:
                self._fall_back(error)
        if self.mode == "text":
            self._write(text.header(self.report))
        self._draw()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close("done")
        elif issubclass(kind, KeyboardInterrupt):
            self.close("interrupted")
        else:
            words = " ".join(f"{kind.__name__}: {error}".split())
            self.close("failed", words if len(words) <= 200 else words[:199] + "…")

    # --- what the trainer says --------------------------------------------------------------------
    def phase(self, name: str) -> None:
        """The phase that begins now: generating, scoring, training, syncing, or any other word."""
        self._now.phase, self._now.done, self._now.total = name, 0, 0
        # A phase that is over before the next redraw may come would use up the frame of the one after it.
        if self.report.phase_seconds().get(name, WINDOW) >= WINDOW / MOST_REDRAWS:
            self._draw()

    def progress(self, done: int, total: int, unit: str = "") -> None:
        """How far the phase is. Takes half of the allowed redraws at most, so that a new phase shows at once."""
        self._now.done, self._now.total, self._now.unit = done, total, unit
        if self._clock() - self._drawn_progress >= WINDOW and self._draw():
            self._drawn_progress = self._clock()

    def memory(
        self,
        used_gib: Mapping[str, float | None] | None,
        free_gib: float | None = None,
        total_gib: float | None = None,
    ) -> None:
        """What fills the card now, in GiB by the driver's figures: weights, kv_cache, training, other.

        `used_gib` None says that there is nothing to show, as on a CPU.
        """
        figures = {"used_gib": used_gib, "free_gib": free_gib, "total_gib": total_gib}
        self.report.memory = None if used_gib is None else clean(figures)

    def completions(self, prompt: str, rows: Sequence[Mapping[str, Any]], step: int | None = None) -> None:
        """One prompt and its generations: completion, reward, advantage, rewards ({name: value}).

        `step` None: that of the step under way, whose figures are still to come.
        """
        step = self.report.step + 1 if step is None else step
        self.report.completions = {"step": step, "prompt": str(prompt), "rows": [clean(row) for row in rows]}

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The figures of a finished step, under TRL's names."""
        self.report.add_step(step, metrics)
        self._step_began = self._clock()
        if self.mode == "text":
            self._write(text.line(self.report))
        self._draw()

    def close(self, status: str = "done", error: str = "") -> None:
        """Ends the run's report and puts the final output in the live one's place. A second call does nothing."""
        if self.report.status != "running":
            return
        self.report.finish(status, error)
        front, self._front, self._faulty = self._front or self._faulty, None, None
        if self.mode == "text":
            self._write(text.final(self.report))
        if front is None:
            return
        try:
            final = bundle(self.report)
        except Exception as fault:
            if self.mode == "widget":
                self._fall_back(fault)
            final = {"text/plain": text.final(self.report)}
        front.replace(final)

    # --- drawing ----------------------------------------------------------------------------------
    def _draw(self) -> bool:
        """Redraws if the second has room for it."""
        now = self._clock()
        if self._front is None or threading.get_ident() != self._thread:
            return False
        if len(self._drawn) == MOST_REDRAWS and now - self._drawn[0] < WINDOW:
            return False
        self._drawn.append(now)
        self.redraws += 1
        self._now.since_step = now - self._step_began
        try:
            if self._learned[0] != len(self.report.steps):
                self._learned = (len(self.report.steps), picture.learning(self.report))
            figures = picture.figures(self.report, self._now, learned=self._learned[1])
            self._front.show(figures, completions(self.report))
        except Exception as error:
            self._fall_back(error)
        return True

    def _fall_back(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
        at = f" ({os.path.basename(where.filename)}, line {where.lineno})" if where else ""
        self._faulty, self._front, self.mode = self._front, None, "text"
        self._write(f"the dashboard goes on as text: {type(error).__name__}: {error}{at}")


class _Widgets:
    """One HTML for the figures, and one for the completions: text that a reader has unfolded stays so for a step."""

    def __init__(self) -> None:
        import ipywidgets
        from IPython.display import display

        layout = {"width": "100%", "margin": "0"}
        self.figures, self.completions = ipywidgets.HTML(layout=layout), ipywidgets.HTML(layout=layout)
        self.box = ipywidgets.VBox([self.figures, self.completions], layout={"width": "100%", "overflow": "hidden"})
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        # Written out, for ipywidgets 7 ignores display_id when it displays a widget of its own accord.
        self.handle = display(
            {"application/vnd.jupyter.widget-view+json": view, "text/plain": "live dashboard: see metrics.jsonl"},
            raw=True,
            display_id=True,
        )

    def show(self, figures: str, completions: str) -> None:
        self.figures.value = figures
        self.completions.value = completions  # the same text again sends nothing

    def replace(self, final: dict[str, str]) -> None:
        self.handle.update(final, raw=True)
        # emptied first: the state of closed widgets may be saved with the notebook
        self.figures.value = self.completions.value = ""
        for widget in (self.box, self.figures, self.completions):
            layout = widget.layout
            widget.close()
            layout.close()


def bundle(report: Report) -> dict[str, str]:
    """The report as one ordinary output: text/html, text/plain and, with Pillow, image/png."""
    plain = text.final(report)
    found = {"text/plain": plain}
    try:
        from . import png

        found["image/png"] = png.draw(report)
    except Exception as error:  # without Pillow, say; the HTML has it all, and must not be lost with it
        found["text/plain"] += f"\n(no PNG: {type(error).__name__}: {error})"
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in text.figures(report))
    table = (
        f'<details style="{picture.ROOT};margin-top:8px"><summary style="cursor:pointer">All figures</summary>'
        f"<table>{rows}</table></details>"
    )
    figures = picture.figures(report, None, found.get("image/png", ""))
    found["text/html"] = figures + completions(report) + table
    return found


def best_mode() -> str:
    """A widget where a notebook's kernel can show one; text elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return "text"
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return "text"
    return "widget"


def _print(words: str) -> None:
    print(words, flush=True)
