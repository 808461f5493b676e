"""The figures of one run, kept in memory and appended to `metrics.jsonl` as they come."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

PHASES = ("generating", "scoring", "training", "syncing")
FIRST_ESTIMATE = 3  # steps; the first ones warm up caches and kernels, and would mislead
WINDOW = 10  # steps, for medians
SAMPLES = 300  # memory samples that are kept


def clean(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinity become None, NumPy and torch scalars plain numbers."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return clean(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | deque):
        return [clean(item) for item in value]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


class Report:
    """What a run has shown so far; `Report.load(folder)` brings it back after the kernel is gone.

    `metrics.jsonl` holds one JSON object a line. Those with a "step" are the steps, under TRL's names (seconds,
    GiB, tokens; a figure that is not finite is null); the others have an "event": start, savings or end.
    A step that is written again, after a resume or a second run in the same folder, replaces the old one
    and all after it.

    `settings` is a Settings or a dict, of which the report reads the batch sizes and `beta`;
    `output_dir` None keeps the figures in memory only. `resume_from` reads the steps up to that one back from the
    file. `reward_names` reserves the legend's room before the first step is done.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        output_dir: str | Path | None,
        total_steps: int,
        *,
        resume_from: int = 0,
        reward_names: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reset(settings, output_dir, total_steps, reward_names)
        self._clock = clock
        self._started = clock()
        if resume_from and self.path and self.path.exists():
            self._read(self.path, last_step=resume_from)
            self._reset(settings, output_dir, total_steps, reward_names, self.steps)
            self._before = sum(row.get("step_time") or 0.0 for row in self.steps)
        self._write({"event": "start", "total_steps": self.total_steps, "settings": self.settings})

    def _reset(self, settings, output_dir, total_steps, reward_names=(), steps=()) -> None:
        self.settings: dict[str, Any] = clean(settings)
        self.path = Path(output_dir) / "metrics.jsonl" if output_dir is not None else None
        self.total_steps = int(total_steps)
        self.steps: list[dict[str, Any]] = list(steps)
        self._columns: dict[str, list[tuple[int, float | None]]] = {}
        self.status = "running"  # then done, interrupted or failed; unfinished: read from a file without an end
        self.error = ""
        self.memory: dict[str, Any] | None = None
        self.completions: dict[str, Any] | None = None
        self.reward_names = list(reward_names)
        self._savings: dict[str, Any] | None = None
        self._samples: deque[tuple[float, float, str]] = deque(maxlen=SAMPLES)
        self._samples_peak: float | None = None
        self._lock = threading.Lock()  # samples come from a thread
        self._before = 0.0  # seconds of the run that this one resumes
        self._seconds: float | None = None
        self._may_write = True

    # --- figures in -------------------------------------------------------------------------------
    def add_step(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps one step and appends it to the file. Returns the row as kept."""
        row = {"step": int(step)} | {key: value for key, value in clean(metrics).items() if key != "step"}
        self._keep(row)
        self._write(row)
        return row

    def memory_sample(self, seconds: float, used_gib: float, phase: str) -> None:
        """One point of the memory timeline; any thread may call it. The last 300 are kept.

        `seconds` since any fixed moment; `used_gib` as the driver says; `phase` "awake" or "asleep", or a phase's
        name (scoring, training and syncing count as asleep).
        """
        if not (math.isfinite(seconds) and math.isfinite(used_gib)):
            return
        with self._lock:
            self._samples.append((float(seconds), float(used_gib), phase))
            self._samples_peak = max(used_gib, self._samples_peak or 0.0)

    @property
    def savings(self) -> dict[str, Any] | None:
        """with_gib, without_gib, saved_gib and reference, as measured by the trainer; None: not measured.

        Set it before the dashboard closes: the final picture is drawn then.
        """
        return self._savings

    @savings.setter
    def savings(self, value: Mapping[str, Any] | None) -> None:
        self._savings = clean(value) if value else None
        self._write({"event": "savings", "savings": self._savings})

    def finish(self, status: str, error: str = "") -> None:
        """Writes the end: `status` is done, interrupted or failed. The last completions and samples go with it."""
        self._seconds = self.seconds
        self.status, self.error = status, error
        end = {"status": status, "error": error, "seconds": self._seconds, "memory": self.memory}
        self._write({"event": "end"} | end | {"completions": self.completions, "samples": self.samples})

    def _keep(self, row: dict[str, Any]) -> None:
        while self.steps and self.steps[-1]["step"] >= row["step"]:
            self.steps.pop()
            self._columns.clear()
        self.steps.append(row)
        for key in row:
            if key.startswith("rewards/") and key.endswith("/mean") and key[8:-5] not in self.reward_names:
                self.reward_names.append(key[8:-5])

    # --- file -------------------------------------------------------------------------------------
    def _write(self, row: Mapping[str, Any]) -> None:
        if self.path is None or not self._may_write:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(clean(row), ensure_ascii=False, allow_nan=False) + "\n"
            with open(self.path, "a+b") as file:  # opened each time: a mounted drive then flushes each step
                if file.seek(0, 2):
                    file.seek(-1, 2)
                    torn = file.read(1) != b"\n"  # an earlier run died while it wrote
                    line = "\n" + line if torn else line
                file.write(line.encode("utf-8", "replace"))
        except OSError as error:
            self._may_write = False  # hours of training are worth more than their log
            print(f"metrics are no longer written to {self.path}: {error}")

    @classmethod
    def load(cls, folder: str | Path) -> Report:
        """The report of a run from its folder (or from the file itself). Raises FileNotFoundError without one.

        A torn last line, as a killed kernel leaves it, is passed over.
        """
        path = Path(folder)
        path = path / "metrics.jsonl" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(f"no metrics.jsonl in {folder}: pass the output_dir of a run")
        report = cls.__new__(cls)
        report._reset({}, None, 0)
        report._clock, report._started = time.monotonic, 0.0
        report.status = "unfinished"
        report._read(path)
        report.total_steps = max(report.total_steps, report.steps[-1]["step"] if report.steps else 0)
        if report._seconds is None:
            report._seconds = sum(row.get("step_time") or 0.0 for row in report.steps)
        return report

    def _read(self, path: Path, last_step: float = math.inf) -> None:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if not isinstance(row, dict):
                continue
            event = row.get("event")
            if "step" in row and event is None and row["step"] <= last_step:
                self._keep(row)
            elif event == "start":
                self.settings, self.total_steps = row.get("settings") or {}, row.get("total_steps") or 0
                self.status, self._seconds, self._savings = "unfinished", None, None
            elif event == "savings":
                self._savings = row.get("savings")
            elif event == "end":
                self.status, self.error = row.get("status", "done"), row.get("error", "")
                self._seconds, self.memory = row.get("seconds"), row.get("memory")
                self.completions = row.get("completions")
                for sample in row.get("samples") or ():
                    self.memory_sample(*sample)

    # --- figures out ------------------------------------------------------------------------------
    @property
    def seconds(self) -> float:
        """Time gone, in seconds; those of the run that this one resumes are counted."""
        return self._before + self._clock() - self._started if self._seconds is None else self._seconds

    @property
    def samples(self) -> list[tuple[float, float, str]]:
        """The memory timeline: (seconds, GiB, phase)."""
        with self._lock:
            return list(self._samples)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.steps[-1]["step"] if self.steps else 0

    def values(self, name: str) -> list[tuple[int, float | None]]:
        """(step, value) of one metric; None where it was missing or not finite."""
        known = self._columns.setdefault(name, [])
        if len(known) > len(self.steps):
            known.clear()
        new = self.steps[len(known) :]  # a frame must not cost more the longer the run has been going
        known.extend((row["step"], value if is_number(value := row.get(name)) else None) for row in new)
        return known

    def finite(self, name: str, recent: int = 0) -> list[float]:
        """The finite values of one metric, in order; `recent` counts the last steps to look at, 0 means all."""
        return [value for _, value in self.values(name)[-recent:] if value is not None]

    def last(self, name: str) -> float | None:
        """The metric's value in the last step."""
        return self.values(name)[-1][1] if self.steps else None

    def peak_gib(self) -> float | None:
        """The most memory in use, by the steps' own peaks and by the samples."""
        peaks = self.finite("memory/peak_gib") + ([self._samples_peak] if self._samples_peak is not None else [])
        return max(peaks, default=None)

    def step_seconds(self) -> float | None:
        """Median seconds of the last 10 steps; None before step 3 is done."""
        recent = self.finite("step_time", WINDOW)
        return median(recent) if len(recent) >= FIRST_ESTIMATE else None

    def phase_seconds(self) -> dict[str, float]:
        """Median seconds a step of each phase, over the last 10 steps, in the order in which they run."""
        found: dict[str, None] = {f"time/{phase}": None for phase in PHASES}
        if self.steps:
            found |= dict.fromkeys(key for key in self.steps[-1] if key.startswith("time/"))
        recent = {key[5:]: self.finite(key, WINDOW) for key in found}
        return {phase: median(values) for phase, values in recent.items() if values}

    def seconds_left(self, since_step: float = 0.0) -> tuple[float, dict[str, float]] | None:
        """Seconds to go, and their split by phase; None before step 3. `since_step`: seconds into this step."""
        each = self.step_seconds()
        if each is None:
            return None
        to_go = max(0, self.total_steps - self.step)
        left = max(each * to_go - since_step, each * max(0, to_go - 1))
        phases = self.phase_seconds()
        whole = sum(phases.values())
        return left, {phase: left * part / whole for phase, part in phases.items()} if whole else {}

    def tokens_per_second(self) -> tuple[float, str] | None:
        """Tokens a second over the last 10 steps, and what they were counted over."""
        rows = self.steps[-WINDOW:]
        batch = self.settings.get("per_device_train_batch_size")
        if batch:
            batch *= self.settings.get("gradient_accumulation_steps") or 1
            pairs = [(row.get("completions/mean_length"), row.get("time/generating")) for row in rows]
            pairs = [(length, spent) for length, spent in pairs if is_number(length) and is_number(spent) and spent]
            if pairs:
                return batch * sum(length for length, _ in pairs) / sum(spent for _, spent in pairs), "generating"
        counts, times = self.finite("num_tokens", WINDOW), self.finite("step_time", WINDOW - 1)
        if len(counts) == len(times) + 1 and sum(times):
            return (counts[-1] - counts[0]) / sum(times), "all told"
        return None

    def change(self) -> tuple[float, float, bool] | None:
        """Mean reward of the first and of the last steps, and whether they differ by more than the noise.

        Each mean is over up to 5 steps; the noise is twice the standard error of their difference, from the scatter
        of neighbouring steps. None before 6 scored steps.
        """
        rewards = self.finite("reward")
        if len(rewards) < 6:
            return None
        k = min(5, len(rewards) // 3)
        first, last = fmean(rewards[:k]), fmean(rewards[-k:])
        jumps = fmean((b - a) ** 2 for a, b in zip(rewards, rewards[1:], strict=False))
        return first, last, abs(last - first) > 2 * math.sqrt(jumps / 2) * math.sqrt(2 / k)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        from .live import bundle

        return bundle(self)


def is_number(value: Any) -> bool:
    """True for a finite int or float, so False for None, NaN and text."""
    return isinstance(value, int | float) and math.isfinite(value)
