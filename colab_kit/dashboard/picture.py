"""The figures as one HTML string: progress, learning, memory.

Pure: the same report gives the same string. Heights are fixed, so that nothing jumps while figures come in; grids
fold into fewer columns on a narrow page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from . import text
from .report import PHASES, Report, is_number
from .svg import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Line,
    plot,
    reach,
    smooth,
    sparkline,
    stack,
    style_of,
    swatch,
    thin,
)

PHASE_COLORS = dict(zip(PHASES, (BLUE, PURPLE, ORANGE, GREEN), strict=True))
MEMORY = {"weights": ("weights", BLUE), "kv_cache": ("KV cache", SKY), "training": ("training", ORANGE)}
ASLEEP = {"asleep", "scoring", "training", "syncing", "waking"}
STATUS_COLORS = {"done": GREEN, "interrupted": ORANGE, "failed": RED}

ROOT = (
    "font:13px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;max-width:960px;"
    "font-variant-numeric:tabular-nums;box-sizing:border-box;padding:2px"
)
CARD = f"border:1px solid {FAINT};border-radius:8px;padding:12px 14px;margin-top:10px;min-width:0;box-sizing:border-box"
SMALL = "font-size:11.5px;opacity:.72"
ONE_LINE = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"


@dataclass
class Now:
    """What the run is doing at this moment."""

    phase: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    since_step: float = 0.0
    """seconds into the step"""


def grid(cells: list[str], narrowest: int, gap: str = "10px 16px") -> str:
    style = f"display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,{narrowest}px),1fr));gap:{gap}"
    return f'<div style="{style}">{"".join(cells)}</div>'


def card(title: str, body: str, right: str = "") -> str:
    head = f'<span style="font-weight:600">{title}</span><span style="{SMALL};{ONE_LINE}">{right}</span>'
    head = f'<div style="display:flex;justify-content:space-between;gap:12px;align-items:baseline">{head}</div>'
    return f'<div style="{CARD}">{head}{body}</div>'


def tile(name: str, value: str, below: str = "&nbsp;") -> str:
    return (
        f'<div style="min-width:0"><div style="{SMALL};{ONE_LINE}">{name}</div>'
        f'<div style="font-size:17px;font-weight:600;line-height:1.3;{ONE_LINE}">{value}</div>'
        f'<div style="{SMALL};{ONE_LINE}">{below}</div></div>'
    )


def key(mark: str, name: str, value: str = "", bold: bool = False) -> str:
    """One entry of a legend."""
    weight = "font-weight:600" if bold else ""
    value = f'<span style="margin-left:auto;flex:none;font-weight:400;opacity:.72">{value}</span>' if value else ""
    return (
        f'<div style="display:flex;gap:7px;align-items:center;min-width:0;font-size:12px;{weight}">{mark}'
        f'<span title="{escape(name)}" style="{ONE_LINE}">{escape(name)}</span>{value}</div>'
    )


def figures(report: Report, now: Now | None = None, png: str = "", learned: str = "") -> str:
    """Progress, learning and memory. `now` None: the run is over. `png`: base64, for viewers that strip SVG.

    `learned` is what `learning` gave since the last step: it is most of the work, and changes only with a step.
    """
    parts = [progress(report, now), instead(report, png) if png else "", learned or learning(report)]
    if report.memory or report.samples or report.peak_gib() is not None:
        parts.append(memory(report))
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{ROOT}">{"".join(parts)}</div>'


def instead(report: Report, png: str) -> str:
    """The PNG, where nothing draws it: inside an SVG's <defs>.

    A viewer that strips SVG, as JupyterLab does in a notebook it does not trust, keeps the picture in the wrapper.
    """
    image = f'<img alt="{escape(text.final(report))}" src="data:image/png;base64,{png}" style="max-width:100%">'
    hidden = f"<defs><foreignObject>{image}</foreignObject></defs>"
    return f'<svg aria-hidden="true" width="0" height="0" style="position:absolute">{hidden}</svg>'


def progress(report: Report, now: Now | None) -> str:
    """Step k of n, the phase, time gone and left, tokens/s."""
    if now is None:
        color, chip = STATUS_COLORS.get(report.status, GREY), escape(report.error)
    else:
        color = PHASE_COLORS.get(now.phase, GREY)
        chip = escape(now.phase or "starting")
        chip += f" · {now.done:,} of {now.total:,} {escape(now.unit)}" if now.total else ""
    each, share = report.step_seconds(), report.step / max(report.total_steps, 1)
    within = min(0.95, now.since_step / each) / max(report.total_steps, 1) if now and each else 0.0
    share, within = min(share, 1.0), min(within, max(0.0, 1 - share))
    if chip:
        dot = f"display:inline-block;width:9px;height:9px;border-radius:50%;background:{color};margin-right:7px"
        fit = ONE_LINE if now else ""  # an error may take the lines that it needs: nothing is moving any more
        chip = f'<span style="flex:1 1 260px;min-width:0;{fit}"><span style="{dot}"></span>{chip}</span>'
    title = f'<span style="font-size:20px;font-weight:600;flex:none">{escape(text.status(report))}</span>'
    head = f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:2px 14px">{title}{chip}</div>'
    filled = BLUE if now else STATUS_COLORS.get(report.status, BLUE)
    bar = (
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{report.total_steps}" aria-valuenow="{report.step}" '
        f'aria-label="steps" style="display:flex;height:8px;border-radius:4px;overflow:hidden;background:{FAINT};'
        f'margin:8px 0 12px"><div style="width:{100 * share:.2f}%;background:{filled}"></div>'
        f'<div style="width:{100 * within:.2f}%;background:{BLUE};opacity:.45"></div></div>'
    )
    left = report.seconds_left(now.since_step) if now else None
    speed = report.tokens_per_second()
    tiles = [tile("time gone", text.duration(report.seconds))]
    if now:
        tiles.append(tile("time left", text.duration(left[0]) if left else "–", "&nbsp;" if left else "from step 3"))
    tiles += [
        tile("a step", text.duration(each), "recent median" if each else "from step 3"),
        tile("tokens/s", text.number(speed[0]) if speed else "–", speed[1] if speed else "&nbsp;"),
        tile("reward", text.number(report.last("reward")), spread(report)),
    ]
    return head + bar + grid(tiles, 104) + phases(report, now, left[1] if left else {})


def spread(report: Report) -> str:
    std = report.last("reward_std")
    return f"± {text.number(std)} in a group" if std is not None else "&nbsp;"


def phases(report: Report, now: Now | None, left: Mapping[str, float]) -> str:
    """How a step's seconds, and those left, are shared among the phases."""
    each = report.phase_seconds()
    names = list(dict.fromkeys([*PHASES, *each]))
    parts = [(each.get(name, 0.0), PHASE_COLORS.get(name, GREY)) for name in names]
    label = "Seconds a step: " + (", ".join(f"{n} {text.duration(each[n])}" for n in names if n in each) or "unknown")
    keys = []
    for name in names:
        mark = swatch(PHASE_COLORS.get(name, GREY), block=True)
        entry = key(mark, name, text.duration(each.get(name)), bold=bool(now) and now.phase == name)
        if now:
            to_go = f"{text.duration(left[name])} left" if name in left else "&nbsp;"
            entry = f'<div>{entry}<div style="{SMALL};text-align:right">{to_go}</div></div>'
        keys.append(entry)
    return f'<div style="margin:12px 0 6px">{stack(parts, 6, label)}</div>{grid(keys, 150, "2px 20px")}'


def learning(report: Report) -> str:
    """The sentence, the mean reward, each reward function, and the figures that warn."""
    end = reach(report.step, report.total_steps)
    x, ends = (1, end), ("step 1", f"step {end:,}")
    means = report.values("reward")
    trend, raw = smooth(means), thin(means)
    std = dict(report.values("reward_std"))
    whole = [(s, mean, std[s]) for s, mean in means if mean is not None and std.get(s) is not None]
    low, high = thin([(s, m - d) for s, m, d in whole]), thin([(s, m + d) for s, m, d in whole])
    band = [(s, below, above) for (s, below), (_, above) in zip(low, high, strict=True)]
    lines = [Line(raw, SKY, width=1.5, opacity=0.9), Line(thin(trend), BLUE, width=2.5)]
    label = f"Mean reward by step. {text.sentence(report)}"
    keys = [key(swatch(BLUE), "trend", text.number(trend[-1][1] if trend else None))]
    keys.append(key(swatch(SKY), "mean", text.number(report.last("reward"))))
    keys.append(key(swatch(f"{BLUE};opacity:.22", block=True), "spread", text.number(report.last("reward_std"))))
    reward = plot(lines, x, label, ends=ends, band=band, floor=0) + legend(keys, 100)
    cards = [card("Mean reward", reward)]
    names = report.reward_names
    series = [report.values(f"rewards/{name}/mean") for name in names]
    lines = [Line(thin(smooth(points)), *style_of(index)) for index, points in enumerate(series)]
    values = [text.number(report.last(f"rewards/{name}/mean")) for name in names]
    label = "Trend of each reward function. " + ", ".join(f"{n}: {v}" for n, v in zip(names, values, strict=True))
    keys = [key(swatch(*style_of(i)), n, v) for i, (n, v) in enumerate(zip(names, values, strict=True))]
    each = plot(lines, x, label, ends=ends, floor=0) + legend(keys, 140)
    cards.append(card("Reward functions", each, "trend of the mean"))
    said = escape(text.sentence(report))
    return (
        f'<div style="margin:8px 0 0;font-size:14px;min-height:2.9em;display:flex;align-items:center">{said}</div>'
        f"{grid(cards, 340, '0 12px')}{small(report, x)}"
    )


def legend(keys: list[str], narrowest: int) -> str:
    return f'<div style="margin-top:6px;min-height:18px">{grid(keys, narrowest, "2px 18px")}</div>'


def small(report: Report, x: tuple[float, float]) -> str:
    """Small drawings: groups without signal, length, share cut at the limit, KL when it is used."""
    shown = [
        ("groups without signal", "frac_reward_zero_std", text.percent, RED, 1.0),
        ("completion length, tokens", "completions/mean_length", text.number, BLUE, None),
        ("truncated at the limit", "completions/clipped_ratio", text.percent, ORANGE, 1.0),
    ]
    if report.settings.get("beta") or report.finite("kl"):
        shown.append(("KL to the base model", "kl", text.number, PURPLE, None))
    cells = []
    for name, metric, say, color, top in shown:
        value = say(report.last(metric))
        drawing = sparkline(thin(report.values(metric)), x, f"{name}: {value}", color, top)
        cells.append(
            f'<div style="{CARD};padding:9px 12px 10px"><div style="{SMALL};{ONE_LINE}">{name}</div>'
            f'<div style="font-size:17px;font-weight:600;margin-bottom:4px">{value}</div>{drawing}</div>'
        )
    return grid(cells, 150, "0 12px")


def used_gib(report: Report) -> list[tuple[str, float]]:
    """What fills the card now, in GiB: the known parts first, always in the same order."""
    used = (report.memory or {}).get("used_gib") or {}
    names = [name for name in MEMORY if name in used] + [name for name in used if name not in MEMORY]
    return [(name, used[name]) for name in names if is_number(used[name])]


def memory(report: Report) -> str:
    """The card as one bar, the timeline with the sleeping phases shaded, the peak, and what was saved."""
    now, body = report.memory or {}, ""
    used = used_gib(report)
    free, total = now.get("free_gib"), now.get("total_gib")
    if used:
        parts = [(*MEMORY.get(name, (name, GREY)), size) for name, size in used]
        parts += [("free", "", free)] if is_number(free) else []
        label = "Memory now: " + ", ".join(f"{name} {text.gib(size)}" for name, _, size in parts)
        keys = [key(swatch(color, block=True), name, text.gib(size)) for name, color, size in parts]
        body += f'<div style="margin:10px 0 8px">{stack([(size, color) for _, color, size in parts], 20, label)}</div>'
        body += grid(keys, 130, "2px 20px")
    if samples := report.samples:
        body += timeline(report, samples)
    if said := text.savings(report):
        body += f'<div style="margin-top:10px">{saved(report)}<div style="margin-top:4px">{escape(said)}</div></div>'
    peak = report.peak_gib()
    right = f"peak {text.gib(peak)}" if peak is not None else ""
    right += f" of {text.gib(total)}" if right and is_number(total) else ""
    return card("Memory", body, right)


def timeline(report: Report, samples: list[tuple[float, float, str]]) -> str:
    """Memory in use over the last samples."""
    shades: list[tuple[float, float]] = []
    previous = None
    for at, _, phase in samples:
        if previous is not None and previous[1] in ASLEEP:
            joined = shades and shades[-1][1] == previous[0]
            shades[-1:] = [(shades[-1][0], at)] if joined else [*shades[-1:], (previous[0], at)]
        previous = (at, phase)
    peak = report.peak_gib()
    x = (samples[0][0], max(samples[-1][0], samples[0][0] + 1e-6))
    low, high = min(used for _, used, _ in samples), max(used for _, used, _ in samples)
    label = f"Memory in use over the last {text.duration(x[1] - x[0])}: {text.gib(low)} to {text.gib(high)}"
    line = Line(thin([(at, used) for at, used, _ in samples], 300), BLUE)
    rules = [(peak, RED)] if peak is not None else []
    ends = (f"{text.duration(x[1] - x[0])} ago", "now" if report.status == "running" else "end")
    drawing = plot([line], x, label, ends=ends, height=96, shades=shades, rules=rules, floor=0)
    # With Standby off the phases go on in the same way, but nothing sleeps.
    released = any(phase == "asleep" for *_, phase in samples) or any(report.finite("memory/freed_gib"))
    asleep = "asleep: KV cache released"
    keys = [key(swatch(BLUE), "in use, GiB"), key(swatch(RED, "7 4"), "peak")]
    keys.append(key(swatch(FAINT, block=True), asleep if released else "scoring, training, syncing"))
    return f'<div style="margin-top:12px">{drawing}</div>{legend(keys, 170)}'


def saved(report: Report) -> str:
    """The peaks with and without Standby, as two bars of one scale."""
    found = report.savings or {}
    most = max(found["with_gib"], found["without_gib"]) or 1
    bars = ""
    for name, size, color in (("with", found["with_gib"], GREEN), ("without", found["without_gib"], GREY)):
        bars += (
            f'<div style="display:flex;gap:10px;align-items:center;margin-top:3px"><span style="flex:none;width:52px;'
            f'{SMALL}">{name}</span><span style="flex:1"><span style="display:block;height:9px;border-radius:3px;'
            f'width:{100 * size / most:.1f}%;background:{color}"></span></span><span style="flex:none;width:64px;'
            f'text-align:right">{text.gib(size)}</span></div>'
        )
    return bars
