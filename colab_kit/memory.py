"""Memory: the plan before anything is loaded, the ledger while it runs, the savings at the end.

Every figure of the ledger comes from the driver: torch's own counters still count a released KV cache.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from .presets import Settings

if TYPE_CHECKING:
    from .policy import Policy

GIB = 2**30


@dataclasses.dataclass
class MemoryChoice:
    """What the plan chose for the engine, with its reasons."""

    dtype: str
    kv_cache_bytes: int | None
    max_num_batched_tokens: int
    reasons: list[str]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def choose_memory(settings: Settings, config: Any) -> MemoryChoice:
    import torch

    reasons = []
    cuda = torch.cuda.is_available()
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if not cuda else "bfloat16" if torch.cuda.is_bf16_supported(False) else "float16"
        reasons.append(f"dtype={dtype}: " + ("exact, and no slower on a CPU" if not cuda else "the card has it"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * getattr(torch, dtype).itemsize
    tokens = (settings.vllm_max_num_seqs or min(settings.completions_per_step, 64)) * settings.max_model_length
    kv = per_token * (tokens + 256)
    if settings.vllm_gpu_memory_utilization is not None and cuda:
        kv = None
    else:
        reasons.append(f"KV cache {kv / GIB:.2f} GiB: room for one step's completions at full length")
    return MemoryChoice(dtype, kv, 2048, reasons)


def choose_devices(policy: Policy, settings: Settings):
    """(tokens a micro-batch, memory devices, host store) for this run's training passes."""
    import torch

    from .long_context import Devices, HostStore

    device = policy.device
    tokens = settings.max_tokens_per_micro_batch or max(2048, settings.max_model_length)
    if device.type == "cpu":
        return tokens, Devices(), None
    layers = policy.model.get_base_model().config.num_hidden_layers
    expand = torch.cuda.get_device_capability(device) < (8, 0)
    if policy.host_store is None:
        policy.host_store = HostStore(device, layers, int(host_available() * 0.6))
    return tokens, Devices(True, True, 4096, expand), policy.host_store


def host_available() -> int:
    """Bytes of system memory that can be taken without swapping."""
    import psutil

    return psutil.virtual_memory().available


class Driver:
    """The card's memory as NVML reports it, and this process's share of it."""

    def __init__(self) -> None:
        from vllm.third_party import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        import torch

        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.others = 0

    def used(self) -> int:
        """Bytes used on the card, by everyone."""
        info = self.nvml.nvmlDeviceGetMemoryInfo(self.handle)
        return info.total - info.free

    def mine(self) -> int:
        return self.used() - self.others


class Ledger:
    """Samples the driver in a thread; keeps the peak of each phase."""

    def __init__(self, driver: Driver, interval: float = 0.02) -> None:
        self.driver, self.interval = driver, interval
        self.phase = "loading"
        self.peaks: dict[str, int] = {}
        self.samples: list[tuple[float, int, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory ledger", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()

    def sample(self) -> int:
        used, phase = self.driver.mine(), self.phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), used)
        self.samples.append((time.monotonic(), used, phase))
        return used

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
