"""Rewards that people reuse: format by tags or by a pattern, a correct number, length.

Each factory returns a reward function whose `__name__` is what its metric is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

_NUMBER = re.compile(
    r"""(?<![\w.])(?P<sign>[-−+]?)(?:[$€£]\s?)?   # a sign after a digit or a word is a minus between two: 10-5
    (?P<digits>-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+)
    (?P<exponent>[eE][-+]?\d+\b)?""",
    re.VERBOSE,
)


def completion_text(completion: str | list[dict]) -> str:
    """The text of a plain or a conversational completion."""
    if isinstance(completion, str):
        return completion
    parts = [message["content"] for message in completion]
    return "".join(p if isinstance(p, str) else "".join(x.get("text", "") for x in p or ()) for p in parts)


def extract_number(text: Any) -> float | None:
    """The last number in a text, after the last `####` if there is one (GSM8K's mark of the answer); None without.

    Reads 1,000 and $1,234.50 and -5 and 5.0 and .5 and 2e3; "10-5" holds 10 and 5, "3, 4" holds 3 and 4.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text) if math.isfinite(text) else None
    numbers = list(_NUMBER.finditer(str(text).rpartition("####")[2]))
    if not numbers:
        return None
    found = numbers[-1]
    digits = found["digits"].replace(",", "") + (found["exponent"] or "")
    number = float(digits) * (-1 if found["sign"] in ("-", "−") else 1)
    return number if math.isfinite(number) else None


def extract_tag(text: str, tag: str) -> str | None:
    """What the last closed `<tag>...</tag>` holds, without the space around it; None if there is none."""
    found = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def format_reward(pattern: str, reward: float = 1.0, name: str = "format_reward") -> Callable:
    """`reward` for a completion that matches the regular expression from its first to its last character (space
    around it is ignored, a dot also matches a line break), else 0."""
    compiled = re.compile(pattern, re.DOTALL)

    def func(completions: Sequence, **_: Any) -> list[float]:
        return [reward if compiled.fullmatch(completion_text(c).strip()) else 0.0 for c in completions]

    func.__name__ = name
    return func


def tag_format(*tags: str, reward: float = 1.0, partial: bool = False, name: str = "tag_format") -> Callable:
    """`reward` for a completion that opens and closes each tag exactly once, in this order, none of them empty.

    With `partial`, each good pair pays its share whatever the order. A small model then soon learns to write the
    tags for their own sake; a number between them (`correct_number(attempt=...)`) is better worth paying for.
    """
    if not tags:
        raise ValueError('tag_format needs at least one tag, as in tag_format("reasoning", "answer")')

    def func(completions: Sequence, **_: Any) -> list[float]:
        rewards = []
        for text in map(completion_text, completions):
            good = [
                text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1 and bool(extract_tag(text, tag))
                for tag in tags
            ]
            marks = [text.find(mark) for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
            whole = all(good) and marks == sorted(marks)
            rewards.append(reward * (sum(good) / len(tags) if partial else float(whole)))
        return rewards

    func.__name__ = name
    return func


def correct_number(
    column: str = "answer",
    tag: str | None = "answer",
    reward: float = 1.0,
    attempt: float = 0.0,
    tolerance: float = 1e-6,
    name: str = "correct_number",
) -> Callable:
    """`reward` if the completion's number is that of the dataset's column, `attempt` if it is another, 0 without one.

    Args:
        column: holds a number or a text that ends in one ("... #### 42"). A row without a number is not scored.
        tag: where the completion's number stands, `<tag>..</tag>`; None takes the last number of the text.
        attempt: for a wrong number in the right place: a step that a small model sometimes takes by itself.
        tolerance: relative to the right number, absolute below 1.
    """

    def one(completion: str | list[dict], truth: Any) -> float | None:
        right = extract_number(truth)
        if right is None:
            return None
        text = completion_text(completion)
        if tag is not None:
            text = extract_tag(text, tag) or ""
        given = extract_number(text)
        if given is None:
            return 0.0
        return reward if abs(given - right) <= tolerance * max(1.0, abs(right)) else attempt

    def func(completions: Sequence, **columns: Any) -> list[float | None]:
        if column not in columns:
            raise ValueError(f"{name} reads column {column!r}, which the dataset does not have; it has {list(columns)}")
        return [one(completion, truth) for completion, truth in zip(completions, columns[column], strict=True)]

    func.__name__ = name
    return func


def length_shaping(max_completion_len: int, soft_punish_cache: int, name: str = "length_shaping") -> Callable:
    """0 up to max_completion_len - soft_punish_cache tokens, then falling to -1 at max_completion_len and beyond.

    DAPO's soft overlong punishment (https://huggingface.co/papers/2503.14476, equation 13).
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be above 0 and at most max_completion_len={max_completion_len}"
        )
    free = max_completion_len - soft_punish_cache

    def func(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [-min(1.0, max(0, len(ids) - free) / soft_punish_cache) + 0.0 for ids in completion_ids]

    func.__name__ = name
    return func
