"""A 4-bit matrix product for decoding batches, on bitsandbytes' weights as they are (`nf4.cu`).

bitsandbytes unpacks a weight to 16 bits in memory for every product of more than a few rows. The kernel here reads the
packed weight once. It is compiled at run time by NVRTC, which comes with torch, so no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import nvrtc

FACTORS = (1.437, 1.6777)
"""NF4's table times this, rounded to bfloat16 or float16, is off by 6.3e-4 or 6.2e-5 (relative, rms); unscaled by
1.06e-3 or 1.56e-4"""
BLOCK_K = 64


@dataclasses.dataclass(frozen=True)
class Variant:
    """How nf4.cu is compiled; the names are its macros."""

    MT: int
    R: int
    WARPS: int
    STAGES: int
    RESIDENT: int
    HALF: int = 0

    @property
    def rows(self) -> int:
        """of W, a block of threads"""
        return self.WARPS * self.R * 16

    @property
    def shared(self) -> int:
        """bytes: 256 for each entry of the table and each 128 of x, which share them"""
        return 256 * max(256, self.STAGES * 4 * self.MT * 8)

    def grid(self, rows: int, n: int, k: int, split: int) -> tuple[int, int, int]:
        """`split` is lowered where a block of threads would be left without work; 4 blocks of 64 are the least."""
        blocks = -(-k // BLOCK_K)
        per = math.ceil(math.ceil(blocks / split) / 4) * 4
        return -(-n // self.rows), -(-blocks // per), -(-rows // (self.MT * 8))

    def workspace(self, grid: tuple[int, int, int]) -> int:
        """float32 values that the blocks of a split K leave for the last of them"""
        return self.rows * self.MT * 8 * grid[0] * grid[1] * grid[2] if grid[1] > 1 else 0


VARIANTS = {
    1: (Variant(1, 1, 8, 4, 2),),
    2: (Variant(2, 1, 8, 4, 2), Variant(2, 2, 8, 4, 1)),
    4: (Variant(4, 2, 8, 3, 1), Variant(4, 1, 8, 3, 2)),
    8: (Variant(8, 2, 8, 2, 1), Variant(8, 1, 8, 2, 2), Variant(4, 2, 8, 2, 1)),
}
"""by tiles of 8 rows of x; the fastest that fits the card's shared memory is chosen by measuring"""


def variants(rows: int, half: bool) -> list[Variant]:
    tiles = next((tiles for tiles in VARIANTS if tiles * 8 >= rows), 8)
    return [dataclasses.replace(variant, HALF=int(half)) for variant in VARIANTS[tiles]]


def splits(variant: Variant, rows: int, n: int, k: int, processors: int) -> list[int]:
    """How often to cut K: so that the blocks of threads fill the card once or twice, or not at all."""
    places = processors * variant.RESIDENT
    tiles, _, batches = variant.grid(rows, n, k, 1)
    wanted = [1, places // (tiles * batches), 2 * places // (tiles * batches)]
    return sorted({variant.grid(rows, n, k, max(1, split))[1] for split in wanted})


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


@functools.cache
def binary(variant: Variant, capability: tuple[int, int]) -> Future:
    """Of the machine code, which a thread compiles: half a second a variant, while the weights load."""
    source = Path(__file__).with_name("nf4.cu").read_bytes()
    return pool().submit(nvrtc.cubin, source, dataclasses.asdict(variant), capability)


@functools.cache
def compiled(variant: Variant, capability: tuple[int, int]) -> Any:
    code = binary(variant, capability).result()
    return nvrtc.load(code, b"nf4_matmul", variant.shared), nvrtc.load(code, b"lora_shrink", 0)


@dataclasses.dataclass
class Adapter:
    """A layer's LoRA matrices in the sampler's slot, a pair for each shard, by address: they are copied into."""

    a: Any
    """int64 (shards,): addresses of A, [rank, K]"""
    b: Any
    """int64 (shards,): of B times alpha / rank, [rows of the shard, rank]"""
    rank: int
    counters: Any
    """int32, zero between launches"""


def adapter(a: list, b: list) -> Adapter | None:
    """From the matrices [rank, K] and [rows, rank] of each shard; None where their shape is not the kernel's."""
    import torch

    rank = a[0].shape[0]
    if rank % 32 or any(m.shape[1] != rank or m.shape[0] % 16 or not m.is_contiguous() for m in b):
        return None
    pointers = [torch.tensor([m.data_ptr() for m in some], dtype=torch.int64, device=a[0].device) for some in (a, b)]
    counters = torch.zeros(4 * len(a) * rank // 16, dtype=torch.int32, device=a[0].device)
    return Adapter(*pointers, rank, counters)


@dataclasses.dataclass
class Weight:
    """A layer's packed weight, its shards' scales by address (they are not copied), and the kernel's own counters."""

    packed: Any
    """uint8, N * K / 2 values, row-major, high nibble first"""
    n: int
    k: int
    shards: Any
    """int64 (shards, 2): the first row, the address of absmax"""
    code: Any
    """float32 (16,)"""
    counters: Any
    """int32, zero between launches: how many blocks of a split K have come"""
    states: list
    """keeps what `shards` points at alive"""


def unsupported(packed: Any, states: list) -> str | None:
    """Why the kernel can't take this weight, or None."""
    import torch

    first = states[0]
    for state in states:
        if state.quant_type != "nf4" or state.blocksize != BLOCK_K:
            return f"{state.quant_type} with blocks of {state.blocksize} values"
        if state.nested or state.absmax.dtype != torch.float32:
            return "its scales are quantized (vLLM's own are not)"
        if len(state.shape) != 2 or state.shape[1] != first.shape[1] or state.shape[1] % BLOCK_K:
            return f"rows of {state.shape[-1]} values, not a multiple of {BLOCK_K}"
        if not torch.equal(state.code, first.code):
            return "its shards have different tables"
        if not state.absmax.is_contiguous() or state.absmax.numel() * BLOCK_K != state.shape[0] * state.shape[1]:
            return "its scales are laid out otherwise"
    n = sum(state.shape[0] for state in states)
    if not packed.is_contiguous() or packed.dtype != torch.uint8 or packed.numel() * 2 != n * first.shape[1]:
        return "its values are laid out otherwise"
    if packed.data_ptr() % 16 or packed.numel() >= 2**32:
        return "it is not aligned to 16 bytes, or has 4 GiB or more"
    return None


def weight(packed: Any, states: list) -> Weight:
    """`unsupported` must have found nothing."""
    import torch

    table, row = [], 0
    for state in states:
        table.append((row, state.absmax.data_ptr()))
        row += state.shape[0]
    shards = torch.tensor(table, dtype=torch.int64, device=packed.device)
    # The smallest tile has 16 rows; four batches of 32 at most.
    counters = torch.zeros(4 * -(-row // 16), dtype=torch.int32, device=packed.device)
    return Weight(packed, row, states[0].shape[1], shards, states[0].code.float().contiguous(), counters, states)


def launch(kernel: Any, grid: tuple[int, int, int], threads: int, shared: int, arguments: list) -> None:
    """On torch's current stream. `arguments`: tensors (by address, None is 0), ints and floats."""
    import torch

    values = [
        ctypes.c_int(v) if isinstance(v, int) else ctypes.c_float(v) if isinstance(v, float)
        else ctypes.c_void_p(v.data_ptr() if v is not None else None)
        for v in arguments
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    result = nvrtc.driver().cuLaunchKernel(kernel, *grid, threads, 1, 1, shared, stream, pointers, None)
    nvrtc.check(result, "cuLaunchKernel")


def shrink_grid(variant: Variant, rows: int, k: int, width: int) -> tuple[int, int, int]:
    """Blocks for X A^T, A of `width` rows in all: each warp of a block takes two chunks of 32 of K."""
    return width // 16, -(-k // (32 * variant.WARPS * 2)), -(-rows // (variant.MT * 8))


def shrink(x: Any, weight: Weight, adapter: Adapter, adapters: Any, variant: Variant) -> Any:
    """x (rows, K) -> (rows, shards, rank): x A^T, zeros where `adapters` (int32, a row's slot) is below 0."""
    import torch

    shards, rows = len(adapter.a), x.shape[0]
    grid = shrink_grid(variant, rows, weight.k, shards * adapter.rank)
    h = torch.empty(rows, shards, adapter.rank, dtype=x.dtype, device=x.device)
    partial = torch.empty(math.prod(grid) * 16 * variant.MT * 8, dtype=torch.float32, device=x.device)
    kernel = compiled(variant, torch.cuda.get_device_capability(x.device))[1]
    sizes = [shards, adapter.rank, rows, weight.k, x.stride(0)]
    arguments = [x, adapter.a, h, partial, adapter.counters, adapters, *sizes]
    launch(kernel, grid, variant.WARPS * 32, 0, arguments)
    return h


def matmul(
    x: Any, weight: Weight, variant: Variant, split: int, adapter: Adapter | None = None, adapters: Any = None
) -> Any:
    """x (rows, K), bfloat16 or float16, on the GPU -> (rows, N) in the same dtype: x W^T. On torch's current stream.

    With an `adapter`, for the rows whose slot in `adapters` (int32) is 0 or above: x W^T + x A^T B^T. The same numbers
    each time: partial sums are added in a fixed order.
    """
    import torch

    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # 16 bytes are read at a time
    rows = x.shape[0]
    grid = variant.grid(rows, weight.n, weight.k, split)
    if grid[0] * grid[2] > weight.counters.numel():
        raise ValueError(f"{rows} rows in tiles of {variant.MT * 8}: take a variant of `variants({rows}, ...)`")
    out = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    partial = torch.empty(variant.workspace(grid), dtype=torch.float32, device=x.device)
    h = shrink(x, weight, adapter, adapters, variant) if adapter else None
    arguments = [
        x, weight.packed, weight.shards, weight.code, out, partial, weight.counters, weight.shards.shape[0], rows,
        weight.n, weight.k, x.stride(0), FACTORS[variant.HALF], h,
        *((adapter.b, adapter.rank) if adapter else (None, 0)),
    ]  # fmt: skip
    kernel = compiled(variant, torch.cuda.get_device_capability(x.device))[0]
    launch(kernel, grid, variant.WARPS * 32, variant.shared, arguments)
    return out


def seconds(call: Callable[[], Any], repeats: int = 7, calls: int = 4) -> float:
    """Median of replaying `calls` calls as a CUDA graph, each after a read of twice the GPU's cache, less the same
    graph without them: the weight comes from memory, as among other layers, and the graph's launch does not count."""
    call()
    return max(replay(call, repeats, calls) - empty_replay(repeats, calls), 1e-9) / calls


@functools.cache
def empty_replay(repeats: int, calls: int) -> float:
    return replay(lambda: None, 10 * repeats, calls)  # more, so that the clocks are up


def replay(call: Callable[[], Any], repeats: int, calls: int) -> float:
    """Seconds, median, of a graph in which the GPU's cache is overrun before each call."""
    import torch

    cache = torch.zeros(torch.cuda.get_device_properties(0).L2_cache_size // 2, dtype=torch.int32, device="cuda")
    most = torch.zeros((), dtype=torch.int32, device="cuda")
    torch.amax(cache, 0, out=most)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        for _ in range(calls):
            torch.amax(cache, 0, out=most)
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def timings(x: Any, weight: Weight) -> dict[tuple[Variant, int], float]:
    """Seconds of each (variant, split) that may be the fastest for this x and weight."""
    import torch

    rows, card = x.shape[0], torch.cuda.get_device_properties(x.device)
    return {
        (variant, split): seconds(functools.partial(matmul, x, weight, variant, split))
        for variant in variants(rows, x.dtype == torch.float16)
        if variant.shared + 1024 <= card.shared_memory_per_block_optin
        for split in splits(variant, rows, weight.n, weight.k, card.multi_processor_count)
    }
