"""Standby: the KV cache's memory belongs to generation while the engine is awake, to training while it sleeps.

`enable_standby()` is the environment contract and must run before vLLM is imported. `Standby` is the state machine:
the engine is asleep except inside `with standby.awake():`, so that nothing (a load, a resume, a merge) ever meets a
resident KV cache by surprise.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import warnings
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .interrupts import uninterrupted

if TYPE_CHECKING:
    from .engine import Engine

VARIABLE = "UNSLOTH_VLLM_STANDBY"
# What an in-process engine that shares its weights needs of vLLM, and why.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the trainer must see the engine's tensors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on a CPU, keep every core for training too
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take a shared CPU's cores from each other: 20 times slower
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings at start are about itself; what a user can act on, the kit says
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def standby_requested() -> bool:
    """Whether `UNSLOTH_VLLM_STANDBY` asks for Standby. Raises ValueError if it is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: set it to 1 (Standby) or 0 (the KV cache stays in memory)")
    return value == "1"


def enable_standby(enabled: bool = True) -> None:
    """Cell 1: set `UNSLOTH_VLLM_STANDBY` and what vLLM needs, before torch or vLLM is imported.

    A value that the environment already holds is left alone and said so, so that one notebook can be run both ways.

    Raises: ValueError for a value other than 0 or 1; RuntimeError if vLLM was imported before.
    """
    before = os.environ.get(VARIABLE)
    if before is not None:
        standby_requested()
        if before != str(int(enabled)):
            print(f"{VARIABLE}={before} was set before this cell and stays so.")
    elif "vllm" in sys.modules:
        raise RuntimeError(
            f"{VARIABLE} must be set before vLLM is imported, and it already is: restart the kernel and run the "
            f"cell with enable_standby() first"
        )
    else:
        os.environ[VARIABLE] = str(int(enabled))
    prepare_environment()


def prepare_environment() -> None:
    """Set what vLLM reads at import; a value of the user's own is kept."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ValueError(
            "VLLM_ENABLE_V1_MULTIPROCESSING must be 0: the engine has to live in this process to share its weights"
        )
    # Said at import by libraries about paths that the kit does not take.
    for logger in ("bitsandbytes.backends.cpu.ops", "vllm.triton_utils.importing"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise ValueError(
                f"{name} has expandable_segments:True, which vLLM's memory pool can't work with: remove it and "
                f"restart the kernel"
            )


class Standby:
    """Awake or asleep. Starts awake, as a fresh engine is.

    With `enabled` False (UNSLOTH_VLLM_STANDBY=0), or on a CPU, the same calls pause and resume the engine and the KV
    cache stays resident.
    """

    def __init__(self, engine: Engine, enabled: bool) -> None:
        self.engine = engine
        self.enabled = enabled and engine.can_release
        self.is_awake = True
        self.freed_bytes = 0
        """what the driver says came free at the last sleep"""
        self.kv_cache_bytes = engine.kv_cache_bytes
        self.sleep_seconds = 0.0
        self.wake_seconds = 0.0
        if self.enabled:
            atexit.register(wake_at_exit, weakref.ref(self))

    @uninterrupted()
    def sleep(self) -> int:
        """Drain, fence, release. Returns the bytes that the driver says came free; 0 if already asleep."""
        if not self.is_awake:
            return 0
        start = time.perf_counter()
        self.engine.drain()
        self.freed_bytes = 0
        if self.enabled:
            self.engine.synchronize()  # nothing may still read the cache when it is unmapped
            before = self.engine.free_bytes()
            self.engine.release_kv_cache()
            self.freed_bytes = self.engine.free_bytes() - before
        self.is_awake = False
        self.sleep_seconds = time.perf_counter() - start
        return self.freed_bytes

    @uninterrupted()
    def wake(self) -> None:
        """Give the trainer's cached blocks back to the driver, map the KV cache again, resume scheduling.

        Raises: MemoryError naming what was needed and free; the engine then stays asleep.
        """
        if self.is_awake:
            return
        start = time.perf_counter()
        if self.enabled:
            self.engine.synchronize()
            self.engine.give_back_cached_blocks()
            free = self.engine.free_bytes()
            if free < self.kv_cache_bytes:
                raise MemoryError(
                    f"the KV cache needs {self.kv_cache_bytes / 2**30:.2f} GiB to wake and {free / 2**30:.2f} GiB is "
                    f"free: something else holds the card's memory (tensors of the notebook, another process). Free "
                    f"it, or load with a lower vllm_gpu_memory_utilization"
                )
            self.engine.restore_kv_cache()
        self.engine.resume()
        self.is_awake = True
        self.wake_seconds = time.perf_counter() - start

    @contextmanager
    def awake(self):
        """Awake inside, asleep after, whatever happened inside."""
        self.wake()
        try:
            yield self
        finally:
            self.sleep()

    @contextmanager
    def asleep(self):
        """Asleep inside; after it as before it."""
        was_awake = self.is_awake
        self.sleep()
        try:
            yield self
        finally:
            if was_awake:
                self.wake()


def wake_at_exit(standby: weakref.ref[Standby]) -> None:
    """vLLM's allocator unmaps all of its memory when the process ends, and complains of what is not mapped."""
    with suppress(Exception):
        standby().wake()
