"""The latest completions as one HTML string. They are untrusted text: everything is escaped and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from . import text
from .picture import ROOT, SMALL, card
from .report import Report, is_number
from .svg import FAINT, GREEN, RED

MOST_ROWS, MOST_CHARACTERS, FOLD = 16, 4000, 150


def completions(report: Report) -> str:
    """The latest prompt with its generations, their rewards and advantages; empty when there are none."""
    shown: dict[str, Any] = report.completions or {}
    rows = shown.get("rows") or []
    if not rows:
        return ""
    widest = max([abs(row["advantage"]) for row in rows if is_number(row.get("advantage"))], default=0) or 1
    body = f'<div style="margin:8px 0;opacity:.8">{folded(shown.get("prompt") or "", "prompt: ")}</div>'
    body += "".join(generation(row, widest) for row in rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        body += f'<div style="{SMALL};padding-top:6px">and {len(rows) - MOST_ROWS} more</div>'
    body = f'<div tabindex="0" style="height:270px;overflow:auto;resize:vertical;margin-top:4px">{body}</div>'
    inner = card("Latest completions", body, f"step {shown['step']}" if shown.get("step") else "")
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{ROOT}">{inner}</div>'


def generation(row: Mapping[str, Any], widest: float) -> str:
    advantage = row.get("advantage")
    reward = text.number(row.get("reward"))
    size = 50 * min(1.0, abs(advantage) / widest) if is_number(advantage) else 0
    color, at = (GREEN, 50.0) if size and advantage > 0 else (RED, 50 - size)
    each = [f"{escape(str(name))} {text.number(value)}" for name, value in (row.get("rewards") or {}).items()]
    extra = (row.get("extra") or {}).items()
    each += [f"{escape(str(name))} <bdi>{escape(str(value)[:300])}</bdi>" for name, value in extra]
    return (
        f'<div style="display:flex;gap:14px;border-top:1px solid {FAINT};padding:7px 0">'
        f'<div style="flex:none;width:78px"><div title="reward" style="font-weight:600">{reward}'
        f'<span title="advantage" style="float:right;font-weight:400;opacity:.72">{text.signed(advantage)}</span></div>'
        f'<div aria-hidden="true" style="position:relative;height:5px;margin-top:4px;border-radius:2px;'
        f'background:{FAINT}"><div style="position:absolute;left:{at:.1f}%;width:{size:.1f}%;height:5px;'
        f'background:{color}"></div></div></div><div style="flex:1;min-width:0;overflow-wrap:anywhere">'
        f'{folded(str(row.get("completion") or ""))}<div style="{SMALL}">{" · ".join(each)}</div></div></div>'
    )


def folded(words: str, before: str = "") -> str:
    """Untrusted text, escaped; long or many-lined text shows its beginning and folds the rest."""
    flat = " ".join(words.split())
    if len(flat) <= FOLD and "\n" not in words.strip():
        return f"{before}<bdi>{escape(flat) or '(empty)'}</bdi>"
    cut = words[:MOST_CHARACTERS] + ("…" if len(words) > MOST_CHARACTERS else "")
    more = "…" if len(flat) > FOLD else ""
    return (
        f'<details><summary style="cursor:pointer">{before}<bdi>{escape(flat[:FOLD])}{more}</bdi></summary>'
        f'<div style="white-space:pre-wrap;padding:4px 0 4px 14px"><bdi>{escape(cut)}</bdi></div></details>'
    )
