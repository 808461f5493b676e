"""The reward contract, which is TRL's, and rewards that people reuse. Plain Python: no torch here.

A reward is any function `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async,
with one number a completion; None means "not scored". `completions` are strings for plain prompts, and
`[{"role": "assistant", "content": ...}]` for conversational ones. Dataset columns arrive as lists under their names,
already repeated for each completion. A function may name only what it uses: `def f(completions, answer)`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from .reward_library import (  # noqa: F401 - one import path for users
    completion_text,
    correct_number,
    extract_number,
    extract_tag,
    format_reward,
    length_shaping,
    tag_format,
)
from .samples import html_table

RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Names that a reward function may ask for, so no dataset column may have them."""


class RewardError(ValueError):
    """A reward function raised, or returned something other than one finite number or None a completion."""


@dataclass(frozen=True)
class Scores:
    rows: list[list[float | None]]
    """[num_completions][num_funcs]; None: not scored"""
    names: list[str]
    metrics: dict[str, float] = field(default_factory=dict)
    """means of what the functions gave to `log_metric(name, value)`"""
    extra: dict[str, list] = field(default_factory=dict)
    """columns that the functions gave to `log_extra(name, values)`, for the table of completions"""


def _as_list(reward_funcs: Callable | Sequence[Callable]) -> list[Callable]:
    return [reward_funcs] if callable(reward_funcs) else list(reward_funcs)


def reward_name(func: Callable) -> str:
    """The name that metrics carry: the function's own, that of a partial's function, or the object's class."""
    return getattr(func, "__name__", None) or getattr(getattr(func, "func", None), "__name__", type(func).__name__)


def validate_reward_funcs(reward_funcs: Callable | Sequence[Callable], settings: Any) -> list[Callable]:
    """The functions as a list, checked before any model is loaded.

    Raises:
        TypeError: one can't be called.
        ValueError: there is none, two have one name, or `settings.reward_weights` has another length.
    """
    funcs = _as_list(reward_funcs)
    if not funcs:
        raise ValueError("reward_funcs is empty; GRPO needs at least one reward function")
    for index, func in enumerate(funcs):
        if not callable(func):
            raise TypeError(f"reward_funcs[{index}] is {type(func).__name__} {func!r}; expected a function")
    names = [reward_name(func) for func in funcs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"reward_funcs has several functions called {twice[0]!r}; metrics need names: set __name__")
    if settings.reward_weights is not None and len(settings.reward_weights) != len(funcs):
        given = len(settings.reward_weights)
        raise ValueError(f"reward_weights has {given} weights for {len(funcs)} reward functions ({', '.join(names)})")
    return funcs


def _arguments(func: Callable, available: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """What `func` is called with: everything if it takes **kwargs, else what its signature names."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return [], available
    positional, kwargs = [], {}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in available:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(parameter.name)
            else:
                kwargs[parameter.name] = available[parameter.name]
        elif parameter.default is parameter.empty:
            near = get_close_matches(parameter.name, available, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RewardError(
                f"reward {reward_name(func)!r} asks for {parameter.name!r}, which is neither a column of the dataset "
                f"nor a standard argument; {hint}there are {', '.join(available)}"
            )
    if takes_all:
        kwargs = {name: value for name, value in available.items() if name not in positional}
    return [available[name] for name in positional], kwargs


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """One event loop in a thread of its own: a notebook's main thread already runs one, where asyncio.run fails, and
    HTTP sessions that live across steps are bound to the loop they were made in."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


def _gather(pending: dict[int, Any]) -> dict[int, Any]:
    """Awaits all at the same time; an exception is returned in its function's place."""

    async def run() -> list:
        return await asyncio.gather(*pending.values(), return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(run(), _background_loop())
    try:
        return dict(zip(pending, future.result(), strict=True))
    except BaseException:  # an interrupt, say: nothing may go on behind the user's back
        future.cancel()
        raise


def _number(name: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    number = value
    if not isinstance(number, numbers.Real) and hasattr(number, "item"):  # numpy and torch scalars
        try:
            number = number.item()
        except (ValueError, RuntimeError):
            pass
    if not isinstance(number, numbers.Real):
        raise RewardError(
            f"reward {name!r} returned {value!r} ({type(value).__name__}) for row {row}; expected a number or None"
        )
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} returned {number} for row {row}; return None for 'not scored'")
    return float(number)


def _checked(name: str, values: Any, expected: int) -> list[float | None]:
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        kind = type(values).__name__
        raise RewardError(f"reward {name!r} returned {kind}; expected a list with {expected} numbers, one a completion")
    values = list(values)
    if len(values) != expected:
        at = min(len(values), expected)
        raise RewardError(
            f"reward {name!r} returned {len(values)} rewards for {expected} completions (row {at} is off)"
        )
    return [_number(name, row, value) for row, value in enumerate(values)]


def score(
    reward_funcs: Callable | Sequence[Callable],
    prompts: Sequence[str | list[dict]],
    completions: Sequence[str | list[dict]],
    completion_ids: Sequence[Sequence[int]],
    columns: dict[str, Sequence] | None = None,
    *,
    trainer_state: Any = None,
) -> Scores:
    """Calls every reward function once on the whole batch; async ones run at the same time.

    All sequences have one entry a completion. `trainer_state` (transformers' TrainerState) lets a reward depend on
    progress.

    Raises:
        RewardError: with the function's name and, for a wrong value, the row; what it raised is the cause.
    """
    expected = len(completions)
    inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **(columns or {})}
    for name, values in inputs.items():
        if len(values) != expected:
            raise ValueError(f"{name} has {len(values)} entries for {expected} completions")
    taken = [name for name in columns or {} if name in RESERVED]
    if taken:
        raise ValueError(f"a dataset column may not be called {taken[0]!r}: reward functions get that from the trainer")
    logged: dict[str, list[float]] = {}
    extra: dict[str, list] = {}
    available = {name: list(values) for name, values in inputs.items()} | {
        "trainer_state": trainer_state,
        "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
        "log_extra": lambda name, values: extra.update({name: list(values)}),
    }

    funcs = _as_list(reward_funcs)
    names = [reward_name(func) for func in funcs]
    calls = [_arguments(func, available) for func in funcs]  # all before the first one runs: they may cost money
    step = f" at step {trainer_state.global_step}" if hasattr(trainer_state, "global_step") else ""

    def failed(name: str, err: BaseException) -> RewardError:
        return RewardError(f"reward {name!r} raised {type(err).__name__}: {err} (on {expected} completions{step})")

    results: dict[int, Any] = {}
    pending: dict[int, Any] = {}
    for index, (func, (args, kwargs)) in enumerate(zip(funcs, calls, strict=True)):
        try:
            results[index] = func(*args, **kwargs)
        except Exception as err:
            for coroutine in pending.values():
                coroutine.close()
            raise failed(names[index], err) from err
        if inspect.iscoroutine(results[index]):
            pending[index] = results[index]
    if pending:
        results.update(_gather(pending))
    for index in pending:
        if isinstance(results[index], BaseException):
            raise failed(names[index], results[index]) from results[index]
    for name, values in extra.items():
        if len(values) != expected:
            raise ValueError(f"log_extra({name!r}) got {len(values)} values for {expected} completions")
    by_func = [_checked(names[index], results[index], expected) for index in range(len(funcs))]
    rows = [list(row) for row in zip(*by_func, strict=True)]
    return Scores(rows, names, {name: sum(v) / len(v) for name, v in logged.items()}, extra)


@dataclass(frozen=True)
class RewardTable:
    """What each reward function gives on each completion; prints as text, shows as a table in a notebook."""

    texts: list[str]
    scores: Scores

    def _cells(self, width: int) -> Iterable[list[str]]:
        def short(value: Any) -> str:
            text = " ".join(str(value).split())
            return text if len(text) <= width else text[: width - 1] + "…"

        extra = self.scores.extra
        yield ["completion", *self.scores.names, *extra]
        for text, row, *more in zip(self.texts, self.scores.rows, *extra.values(), strict=True):
            scored = ("not scored" if value is None else f"{value:g}" for value in row)
            yield [short(text), *scored, *map(short, more)]

    def __str__(self) -> str:
        cells = list(self._cells(60))
        widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
        lines = ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]).rstrip() for r in cells]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self._cells(300)
        return html_table({name: [row[k] for row in rows] for k, name in enumerate(head)})


def try_rewards(
    reward_funcs: Callable | Sequence[Callable],
    completions: Sequence[str | list[dict]],
    prompts: Sequence[str | list[dict]] | None = None,
    **columns: Any,
) -> RewardTable:
    """What each reward gives on completions that you wrote, before any training.

        try_rewards([correct_number()], ["<answer>4</answer>", "four"], answer="4")

    Args:
        prompts: one a completion, or None. With conversational prompts, completions given as strings reach the
            functions as assistant messages, as they will in training.
        columns: the dataset's columns; what is not a list or tuple is repeated for every completion.
            `completion_ids` may be given too, for rewards that count tokens; empty lists otherwise.
    """
    count = len(completions)
    prompts = [""] * count if prompts is None else list(prompts)
    given = [
        [{"role": "assistant", "content": text}] if isinstance(text, str) and not isinstance(prompt, str) else text
        for text, prompt in zip(completions, prompts, strict=True)
    ]
    lists = {name: list(v) if isinstance(v, (list, tuple)) else [v] * count for name, v in columns.items()}
    ids = lists.pop("completion_ids", [[]] * count)
    scores = score(reward_funcs, prompts, given, ids, lists)
    return RewardTable([completion_text(text) for text in given], scores)
