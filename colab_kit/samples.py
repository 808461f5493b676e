"""Prompts with their completions, as tables that a notebook or a terminal shows."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import Any


class Samples:
    """Prompts with their completions. `samples[i]` lists the completions of prompt i; `samples[:3]` is a part."""

    def __init__(self, rows: Sequence[dict[str, Any]], completions: Sequence[list[str]], sampling: dict) -> None:
        self.rows, self.completions, self.sampling = list(rows), list(completions), sampling

    def __getitem__(self, index: int | slice) -> list[str] | Samples:
        if isinstance(index, slice):
            return Samples(self.rows[index], self.completions[index], self.sampling)
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def columns(self) -> dict[str, list[str]]:
        return {"prompt": [last_message(row["prompt"]) for row in self.rows]} | {
            "completion": ["\n---\n".join(group) for group in self.completions]
        }

    def __repr__(self) -> str:
        return text_table(self.columns)

    def _repr_html_(self) -> str:
        return html_table(self.columns)


def as_rows(prompts: Any) -> list[dict[str, Any]]:
    """Rows with a `prompt` from whatever a slice of a dataset, a list of strings or of message lists is."""
    if isinstance(prompts, dict):  # what datasets.Dataset[:4] gives
        return [dict(zip(prompts, values, strict=True)) for values in zip(*prompts.values(), strict=True)]
    return [row if isinstance(row, dict) and "role" not in row else {"prompt": row} for row in prompts]


def last_message(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def text_table(columns: dict[str, list[str]], width: int = 60) -> str:
    lines = []
    for i in range(len(next(iter(columns.values()), []))):
        for name, values in columns.items():
            wrapped = [w for line in str(values[i]).splitlines() or [""] for w in textwrap.wrap(line, width) or [""]]
            lines += [f"{name if j == 0 else '':>12}  {text}" for j, text in enumerate(wrapped)]
        lines.append("")
    return "\n".join(lines)


def html_table(columns: dict[str, list[str]]) -> str:
    cell = (
        'style="text-align:left;vertical-align:top;white-space:pre-wrap;min-width:7em;max-width:32em;padding:4px 12px"'
    )
    head = "".join(f"<th {cell}>{html.escape(name)}</th>" for name in columns)
    rows = zip(*columns.values(), strict=True)
    body = "".join("<tr>" + "".join(f"<td {cell}>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Comparison(Samples):
    """Completions before and after, side by side."""

    def __init__(self, before: Samples, after: Samples) -> None:
        super().__init__(before.rows, after.completions, after.sampling)
        self.before = before

    def __getitem__(self, index: int | slice) -> list[str] | Comparison:
        after = super().__getitem__(index)
        return Comparison(self.before[index], after) if isinstance(index, slice) else after

    @property
    def columns(self) -> dict[str, list[str]]:
        columns = super().columns
        return {
            "prompt": columns["prompt"],
            "before": self.before.columns["completion"],
            "after": columns["completion"],
        }
