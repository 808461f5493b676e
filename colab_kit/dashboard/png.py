"""The final picture as a PNG, for viewers that strip SVG from saved notebooks. Needs Pillow."""

from __future__ import annotations

import base64
import io
import textwrap
from typing import Any

from . import text
from .picture import MEMORY, used_gib
from .report import Report, is_number
from .svg import BLUE, SKY, Line, axis, reach, smooth, style_of, thin, ticks

WIDTH, MARGIN, SHARP = 900, 24, 2  # pixels; drawn at twice the size, then reduced, so that edges are smooth
PAPER, INK, SOFT, LINES, BAND = "#ffffff", "#1f2328", "#656d76", "#e3e5e8", "#d9eaf4"


class Sheet:
    """A page in final pixels."""

    def __init__(self, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH * SHARP, height * SHARP), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.height = height

    def write(self, x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "la") -> None:
        from PIL import ImageFont

        # the font that ships inside Pillow has no arrows, dashes or typographic minus
        words = words.replace("→", "to").replace("–", "-").replace("−", "-").replace("…", "...")
        font = ImageFont.load_default(size * SHARP)
        self.draw.text((x * SHARP, y * SHARP), words, fill=color, font=font, anchor=anchor)

    def line(self, points: list[tuple[float, float]], color: str, width: float) -> None:
        scaled = [(x * SHARP, y * SHARP) for x, y in points]
        if len(scaled) > 1:
            self.draw.line(scaled, fill=color, width=round(width * SHARP), joint="curve")
        elif scaled:
            (x, y), r = scaled[0], 2 * SHARP
            self.draw.ellipse((x - r, y - r, x + r, y + r), fill=color)

    def area(self, points: list[tuple[float, float]], color: str) -> None:
        self.draw.polygon([(x * SHARP, y * SHARP) for x, y in points], fill=color)

    def block(self, x0: float, y0: float, x1: float, y1: float, color: str) -> None:
        self.draw.rectangle((x0 * SHARP, y0 * SHARP, x1 * SHARP - 1, y1 * SHARP - 1), fill=color)

    def encoded(self) -> str:
        image = self.image.resize((WIDTH, self.height), 1).quantize(128, method=2)  # Lanczos; fast octree
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True)
        return base64.b64encode(buffer.getvalue()).decode()


def draw(report: Report) -> str:
    """The report as a PNG in base64, 900 px wide. Raises ImportError without Pillow."""
    said = textwrap.wrap(report.error, 112) + textwrap.wrap(text.sentence(report), 112)
    facts = [(name, value) for name, value in text.figures(report) if name != "savings"]
    ends = textwrap.wrap(text.savings(report), 118)
    used = used_gib(report)
    half = (len(facts) + 1) // 2
    height = 290 + 20 * len(said) + (64 if used else 0) + 20 * half + (4 + 20 * len(ends) if ends else 0) + MARGIN
    sheet = Sheet(height)
    sheet.write(MARGIN, 20, text.status(report), 20)
    y = 54
    for words in said:
        sheet.write(MARGIN, y, words, 14)
        y += 20
    middle = WIDTH // 2
    trend, raw = smooth(report.values("reward")), report.values("reward")
    std = dict(report.values("reward_std"))
    band = [(s, m - std[s], m + std[s]) for s, m in raw if m is not None and std.get(s) is not None]
    mean = [Line(thin(raw), SKY, "", 1.5), Line(thin(trend), BLUE, "", 2.4)]
    chart(sheet, (MARGIN, y + 10, middle - 14, y + 220), "Mean reward: trend, spread", mean, report, band)
    each = [(f"rewards/{name}/mean", *style_of(index)) for index, name in enumerate(report.reward_names)]
    lines = [Line(thin(smooth(report.values(name))), color, "", 1.2 if dash else 2) for name, color, dash in each]
    chart(sheet, (middle + 14, y + 10, WIDTH - MARGIN, y + 220), "Reward functions: trend", lines, report)
    y += 236
    if used:
        memory(sheet, y, used, report.memory or {})
        y += 64
    colors = {f"reward {name}": color for name, (_, color, _) in zip(report.reward_names, each, strict=True)}
    for index, (name, value) in enumerate(facts):
        x, row = (MARGIN, index) if index < half else (middle + 14, index - half)
        if color := colors.get(name):
            sheet.block(x, y + 20 * row + 3, x + 10, y + 20 * row + 13, color)
        sheet.write(x + 16 * bool(color), y + 20 * row, name if len(name) < 24 else name[:20] + "…", 13, SOFT)
        sheet.write(x + 170, y + 20 * row, (value if len(value) < 46 else value.split(" (")[0])[:45], 13)
    y += 20 * half
    for row, words in enumerate(ends):
        sheet.write(MARGIN, y + 4 + 20 * row, words, 13)
    return sheet.encoded()


def chart(
    sheet: Sheet, box: tuple[float, float, float, float], title: str, lines: list[Line], report: Report, band: Any = ()
) -> None:
    """Lines over an axis in `box` (left, top, right, bottom); `band` is (step, low, high)."""
    left, top, right, bottom = box
    sheet.write(left, top + 2, title, 13)
    left, top, bottom = left + 38, top + 30, bottom - 22
    known = [y for line in lines for _, y in line.points if y is not None] + [y for _, *edges in band for y in edges]
    marks = ticks(min(known), max(known)) if known else [0, 0.5, 1]
    end = reach(report.step, report.total_steps)

    def at(x: float, y: float) -> tuple[float, float]:
        high = (y - marks[0]) / (marks[-1] - marks[0])
        return left + (right - left) * (x - 1) / (end - 1), bottom - (bottom - top) * high

    if len(band) > 1:
        sheet.area([at(x, high) for x, _, high in band] + [at(x, low) for x, low, _ in reversed(band)], BAND)
    for mark in marks:
        sheet.line([at(1, mark), at(end, mark)], LINES, 1)
        sheet.write(left - 8, at(1, mark)[1], axis(mark, marks), 11, SOFT, "rm")
    for line in lines:
        run: list[tuple[float, float]] = []
        for x, y in [*line.points, (0, None)]:
            if y is not None:
                run.append(at(x, y))
            elif run:
                sheet.line(run, line.color, line.width)
                run = []
    sheet.write(left, bottom + 6, "step 1", 11, SOFT)
    sheet.write(right, bottom + 6, f"step {end:,}", 11, SOFT, "ra")


def memory(sheet: Sheet, y: float, used: list[tuple[str, float]], now: dict[str, Any]) -> None:
    """The card as one bar, with its legend under it."""
    free = now.get("free_gib") if is_number(now.get("free_gib")) else 0.0
    parts = [(*MEMORY.get(name, (name, "#9a9a9a")), size) for name, size in used] + [("free", LINES, free)]
    whole, x, key = sum(size for _, _, size in parts) or 1, float(MARGIN), float(MARGIN)
    for name, color, size in parts:
        wide = (WIDTH - 2 * MARGIN) * size / whole
        if wide > 3:
            sheet.block(x, y, x + wide - 2, y + 18, color)
        x += wide
        sheet.block(key, y + 29, key + 10, y + 39, color)
        sheet.write(key + 15, y + 27, f"{name} {text.gib(size)}", 12, SOFT)
        key += 165
