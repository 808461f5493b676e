"""Memory while a run goes on: the ledger, what Standby saved, and errors that name a setting.

Every figure of the ledger comes from the driver: torch's own counters still count a released KV cache.
"""

from __future__ import annotations

import collections
import os
import re
import threading
import time
from typing import Any

from .presets import Settings

GIB = 2**30


class Driver:
    """The card's memory as NVML reports it, and this process's share. Make it before torch creates its context."""

    def __init__(self) -> None:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)
        self._info = pynvml.nvmlDeviceGetMemoryInfo
        self.total = self._info(self.handle).total
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        own = next((p.usedGpuMemory or 0 for p in processes if p.pid == os.getpid()), 0)
        self.others = self.used() - own
        """bytes that are not this process's: other processes, and what the driver keeps for itself"""

    def used(self) -> int:
        """Bytes used on the card, by everyone."""
        return self.total - self._info(self.handle).free

    def mine(self) -> int:
        return max(self.used() - self.others, 0)


class Ledger:
    """Samples the driver in a thread and keeps the peak of each phase, in bytes."""

    def __init__(self, driver: Driver, interval: float = 0.02) -> None:
        self.driver, self.interval = driver, interval
        self.phase = "loading"
        self.peaks: dict[str, int] = {}
        self.samples: collections.deque[tuple[float, int, str]] = collections.deque(maxlen=100_000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory ledger", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()

    def sample(self) -> int:
        """One reading, now; also at every change of phase, so that none is missed."""
        used, phase = self.driver.mine(), self.phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), used)
        self.samples.append((time.monotonic(), used, phase))
        return used

    def enter(self, phase: str) -> None:
        self.sample()
        self.phase = phase
        self.sample()

    def forget(self) -> None:
        """Begin new peaks: a run's are its own."""
        self.peaks.clear()
        self.samples.clear()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def savings(peaks: dict[str, int], kv_cache_bytes: int, standby: bool) -> dict[str, Any] | None:
    """What the run needed at its peak, and what the same run would have needed with the KV cache resident.

    Without Standby the cache stays while training: the training phases' measured peak plus the bytes that the driver
    said came free. None without Standby or before a whole step was measured. GiB.
    """
    if not standby or "training" not in peaks or "generating" not in peaks:
        return None
    asleep = max(peak for phase, peak in peaks.items() if phase not in ("generating", "loading"))
    with_standby = max(peaks["generating"], asleep)
    without = max(peaks["generating"], asleep + kv_cache_bytes)
    return {
        "with_gib": with_standby / GIB,
        "without_gib": without / GIB,
        "saved_gib": (without - with_standby) / GIB,
        "reference": "this run's training peak plus the KV cache that Standby took away, both as the driver counts",
    }


class OutOfMemory(MemoryError):
    """The card ran out; says in which phase, how much was asked for and free, and one setting to change first."""


def explain_oom(error: BaseException, phase: str, free_bytes: int, settings: Settings, longest: int) -> OutOfMemory:
    asked = re.search(r"Tried to allocate ([\d.]+ [KMG]iB)", str(error))
    if phase == "generating":
        knob = "lower vllm_gpu_memory_utilization, or max_completion_length"
    elif longest and (settings.max_tokens_per_micro_batch or 0) > longest:
        knob = f"lower max_tokens_per_micro_batch ({settings.max_tokens_per_micro_batch}; the longest is {longest})"
    else:
        knob = f"lower max_completion_length ({settings.max_completion_length}; the longest sequence has {longest})"
    return OutOfMemory(
        f"out of GPU memory while {phase}: {asked.group(1) if asked else 'more'} was asked for, {free_bytes / GIB:.2f} "
        f"GiB was free. First {knob}."
    )
