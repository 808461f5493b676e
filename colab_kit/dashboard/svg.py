"""Figures as drawings: numbers in, SVG and HTML strings out.

Drawings hold no text: they stretch to the width they are given, and text in them would shrink with it. Labels are
HTML beside them. Text and axes take the page's own colour (`currentColor`), so that light and dark themes
both work; the other colours are Okabe and Ito's (2008), which colour-blind people can tell apart, and
lines differ by their dashes too. Only `style` attributes: notebooks strip style sheets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
SERIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("", "7 4", "2 4")
GREY = "rgba(128,128,128,.55)"
FAINT = "rgba(128,128,128,.22)"
MOST_POINTS = 160  # of a line; a longer run is averaged down, so that a frame's size has a bound
WIDE, HIGH = 600, 100  # the drawing's own units

Point = tuple[float, float | None]


@dataclass
class Line:
    points: Sequence[Point]
    color: str
    dash: str = ""
    width: float = 2
    opacity: float = 1


def style_of(index: int) -> tuple[str, str]:
    """Colour and dashes of the line with this number: 18 that differ."""
    return SERIES[index % len(SERIES)], DASHES[index // len(SERIES) % len(DASHES)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points, each the mean of its neighbours; gaps (None) stay where nothing else is."""
    stride = math.ceil(len(points) / most)
    if stride <= 1:
        return list(points)
    groups = (points[start : start + stride] for start in range(0, len(points), stride))
    thinned = []
    for group in groups:
        known = [y for _, y in group if y is not None]
        middle = (group[0][0] + group[-1][0]) / 2
        thinned.append((middle, sum(known) / len(known) if known else None))
    return thinned


def smooth(points: Sequence[Point]) -> list[Point]:
    """The trend: an exponential moving average over about a tenth of the run (5 steps at least), without start bias."""
    keep = 1 - 2 / (max(5, len(points) / 10) + 1)
    total = weight = 0.0
    trend: list[Point] = []
    for x, y in points:
        if y is not None:
            total, weight = keep * total + (1 - keep) * y, keep * weight + 1 - keep
        trend.append((x, total / weight if weight else None))
    return trend


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round values that span low to high, ends included."""
    if high - low < 1e-9:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    raw = (high - low) / most
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * times for times in (1, 2, 2.5, 5, 10) if scale * times >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [round(index * step, 10) for index in range(first, last + 1)]


def reach(step: int, total: int) -> int:
    """The last step on the axis: the whole run, halved while the figures would fill less than a third of it."""
    end = max(total, step, 2)
    while end > 20 and step * 3 < end:
        end = math.ceil(end / 2)
    return end


def axis(value: float, marks: Sequence[float]) -> str:
    """A tick's label, with the digits that its neighbours need."""
    gap = min((b - a for a, b in zip(marks, marks[1:], strict=False)), default=1)
    digits = next((n for n in range(5) if abs(gap * 10**n - round(gap * 10**n)) < 1e-6), 5)
    return f"{value:,.{digits}f}".replace("-", "−")


class Scale:
    """From figures to the drawing's units."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        return WIDE * (x - x0) / ((x1 - x0) or 1), HIGH * (1 - (y - y0) / ((y1 - y0) or 1))

    def path(self, points: Iterable[Point]) -> str:
        """A line through the points, broken at gaps; a lone point becomes a dot."""
        runs: list[list[str]] = [[]]
        for x, y in points:
            if y is None:
                runs.append([])
            else:
                runs[-1].append("{:.1f} {:.1f}".format(*self(x, y)))
        return "".join("M" + "L".join(run) if len(run) > 1 else f"M{run[0]}h.01" for run in runs if run)


def svg(body: str, height: str, label: str) -> str:
    """An SVG as wide as its parent; `label` is its text equivalent."""
    label = escape(label)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" '
        f'style="display:block;width:100%;height:{height};overflow:visible"><title>{label}</title>{body}</svg>'
    )


def stroke(path: str, line: Line) -> str:
    width = 5 if path.endswith("h.01") else line.width  # a lone point is a dot, and must be seen
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{line.color}" stroke-width="{width}" opacity="{line.opacity}"'
        f'{dash} stroke-linejoin="round" stroke-linecap="round" vector-effect="non-scaling-stroke"/>'
    )


def plot(
    lines: Sequence[Line],
    x: tuple[float, float],
    label: str,
    *,
    ends: tuple[str, str],
    height: int = 150,
    band: Sequence[tuple[float, float, float]] = (),
    shades: Sequence[tuple[float, float]] = (),
    rules: Sequence[tuple[float, str]] = (),
    floor: float | None = None,
) -> str:
    """Lines over an axis with labels, `height` px high whatever it holds.

    `band` is (x, low, high); `shades` are spans of x; `rules` are dashed levels (y, colour); `ends` label the
    ends of the x axis; `floor` is a value that the y axis must reach.
    """
    known = [y for line in lines for _, y in line.points if y is not None]
    known += [edge for _, low, high in band for edge in (low, high)] + [level for level, _ in rules]
    if floor is not None and known:
        known.append(floor)
    marks = ticks(min(known), max(known)) if known else [0, 0.5, 1]
    scale = Scale(x, (marks[0], marks[-1]))
    body = []
    for start, end in shades:
        (left, _), (right, _) = scale(start, 0), scale(end, 0)
        body.append(f'<rect x="{left:.1f}" y="0" width="{max(right - left, 0.5):.1f}" height="{HIGH}" fill="{FAINT}"/>')
    for mark in marks:
        body.append(stroke(scale.path([(x[0], mark), (x[1], mark)]), Line((), "currentColor", "", 1, 0.14)))
    if len(band) > 1:
        edge = [(at, high) for at, _, high in band] + [(at, low) for at, low, _ in reversed(band)]
        body.append(f'<path d="{scale.path(edge)}Z" fill="{lines[-1].color}" fill-opacity=".16"/>')
    for level, color in rules:
        body.append(stroke(scale.path([(x[0], level), (x[1], level)]), Line((), color, "6 4", 1.5)))
    body += [stroke(path, line) for line in lines if (path := scale.path(line.points))]
    labels = "".join(
        f'<span style="position:absolute;right:0;top:{100 * (1 - index / (len(marks) - 1)):.1f}%;'
        f'transform:translateY(-50%)">{axis(mark, marks)}</span>'
        for index, mark in enumerate(marks)
    )
    return (
        f'<div style="display:flex;gap:8px;height:{height}px;margin:8px 0 3px">'
        f'<div aria-hidden="true" style="position:relative;flex:none;width:34px;font-size:11px;line-height:1;'
        f'opacity:.7;white-space:nowrap">{labels}</div>'
        f'<div style="flex:1;min-width:0">{svg("".join(body), "100%", label)}</div></div>'
        f'<div aria-hidden="true" style="display:flex;justify-content:space-between;margin-left:42px;font-size:11px;'
        f'opacity:.7"><span>{escape(ends[0])}</span><span>{escape(ends[1])}</span></div>'
    )


def sparkline(points: Sequence[Point], x: tuple[float, float], label: str, color: str, top: float | None = None) -> str:
    """A small line without axes, 34 px high, from 0 up to `top` (None: the largest value)."""
    known = [y for _, y in points if y is not None]
    high = top if top is not None else max(known, default=1.0) or 1.0
    scale = Scale(x, (min(0.0, min(known, default=0.0)), max(high, 1e-12)))
    base = stroke(scale.path([(x[0], 0), (x[1], 0)]), Line((), "currentColor", "", 1, 0.2))
    path = scale.path(points)
    return svg(base + (stroke(path, Line((), color, "", 1.75)) if path else ""), "34px", label)


def stack(parts: Sequence[tuple[float, str]], height: int, label: str) -> str:
    """One bar of parts (size, colour) side by side; a part without colour is outlined: it is free."""
    inner = "".join(
        f'<div style="flex:{size:.4f} 1 0;{f"background:{color}" if color else "opacity:0"}"></div>'
        for size, color in parts
        if size > 0
    )
    return (
        f'<div role="img" aria-label="{escape(label)}" title="{escape(label)}" style="display:flex;gap:2px;'
        f'height:{height}px;border-radius:4px;overflow:hidden;background:{FAINT}">{inner}</div>'
    )


def swatch(color: str, dash: str = "", block: bool = False) -> str:
    """A legend's key: a block, or a line with the dashes of its series."""
    if block:
        look = f"height:10px;border-radius:2px;width:10px;background:{color or FAINT}"
    else:
        kind = {"": "solid", DASHES[1]: "dashed", DASHES[2]: "dotted"}[dash]
        look = f"width:18px;border-top:3px {kind} {color}"
    return f'<span aria-hidden="true" style="display:inline-block;flex:none;{look}"></span>'
