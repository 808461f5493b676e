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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import nvrtc
from .nf4_variants import BLOCK_K, GROUP, Variant, groups

FACTORS = (1.437, 1.6777)
"""NF4's table times this, rounded to bfloat16 or float16, is off by 6.3e-4 or 6.2e-5 (relative, rms); unscaled by
1.06e-3 or 1.56e-4"""
SOURCES = ("nf4_device.cu", "nf4_parts.cu", "nf4.cu", "nf4_lora.cu")


def source() -> bytes:
    return b"".join(Path(__file__).with_name(name).read_bytes() for name in SOURCES)


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


@functools.cache
def binary(variant: Variant, capability: tuple[int, int]) -> Future:
    """Of the machine code, which a thread compiles: a second a variant, while the weights load."""
    return pool().submit(nvrtc.cubin, source(), dataclasses.asdict(variant), capability)


@functools.cache
def compiled(variant: Variant, capability: tuple[int, int]) -> dict[str, Any]:
    """The kernels by name."""
    code = binary(variant, capability).result()
    shared = {"nf4_matmul": variant.shared, "lora_shrink": variant.sums}
    if variant.prepared:
        shared["prepare_x"] = 0
    return {name: nvrtc.load(code, name.encode(), size) for name, size in shared.items()}


@functools.cache
def patience(variant: Variant, grid: tuple[int, int, int], device: Any) -> int:
    """How the blocks of a split K add their sums. -1: as a cluster, where all clusters run at the same time; else how
    often a block looks whether the others are done: only if they run at the same time."""
    import torch

    card, capability = torch.cuda.get_device_properties(device), torch.cuda.get_device_capability(device)
    if capability >= (9, 0) and 1 < grid[2] <= 8:
        kernel, threads = compiled(variant, capability)["nf4_matmul"], variant.WARPS * 32
        at_once = nvrtc.clusters_at_once(kernel, grid, threads, variant.shared, grid[2])
        if grid[0] * grid[1] <= at_once:
            return -1
    resident = min(variant.RESIDENT, card.shared_memory_per_multiprocessor // variant.taken)
    return 100 if math.prod(grid) <= card.multi_processor_count * resident else 0


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
    ready: Any
    """int32: 1 for each tile of x A^T that is there"""


def adapter(a: list, b: list) -> Adapter | None:
    """From the matrices [rank, K] and [rows, rank] of each shard; None where their shape is not the kernel's."""
    import torch

    rank = a[0].shape[0]
    if rank % 32 or any(m.shape[1] != rank or m.shape[0] % 16 or not m.is_contiguous() for m in b):
        return None
    pointers = [torch.tensor([m.data_ptr() for m in some], dtype=torch.int64, device=a[0].device) for some in (a, b)]
    counters = torch.zeros(2, 4 * len(a) * rank // 16, dtype=torch.int32, device=a[0].device)
    return Adapter(*pointers, rank, *counters)


class Fixed(ctypes.Structure):
    """The shards and the table of 16, as nf4.cu takes them."""

    _fields_ = [("shards", ctypes.c_int64 * 2 * 8), ("code", ctypes.c_float * 16)]


@dataclasses.dataclass
class Weight:
    """A layer's packed weight, its shards' scales by address (they are not copied), and the kernel's own counters."""

    packed: Any
    """uint8, N * K / 2 values, row-major, high nibble first"""
    n: int
    k: int
    fixed: Fixed
    counters: Any
    """int32, zero between launches: two for each tile of a split K, of what its blocks of threads have done"""
    states: list
    """of the shards; keeps what `fixed` points at alive"""


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
    if len(states) > 8:
        return f"{len(states)} shards, of which the kernel takes 8"
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
    fixed = Fixed(tuple(table), tuple(states[0].code.tolist()))
    # Two for each of the tiles, which have 16 rows or more, and the batches, which are four at most.
    counters = torch.zeros(8 * -(-row // 16), dtype=torch.int32, device=packed.device)
    return Weight(packed, row, states[0].shape[1], fixed, counters, states)


def shrink_grid(variant: Variant, rows: int, k: int, width: int) -> tuple[int, int, int]:
    """Blocks for X A^T, A of `width` rows in all: each warp of a block takes two chunks of 32 of K."""
    return width // 16, -(-k // (32 * variant.WARPS * 2)), -(-rows // (variant.MT * 8))


def shrink(x: Any, weight: Weight, adapter: Adapter, adapters: Any, variant: Variant, kernel: Any) -> Any:
    """x (rows, K) -> (rows, shards, rank): x A^T, zeros where `adapters` (int32, a row's slot) is below 0."""
    import torch

    shards, rows = len(adapter.a), x.shape[0]
    grid = shrink_grid(variant, rows, weight.k, shards * adapter.rank)
    h = torch.empty(rows, shards, adapter.rank, dtype=x.dtype, device=x.device)
    partial = torch.empty(math.prod(grid) * 16 * variant.MT * 8, dtype=torch.float32, device=x.device)
    sizes = [shards, adapter.rank, rows, weight.k, x.stride(0)]
    arguments = [x, adapter.a, h, partial, adapter.counters, adapters, *sizes, adapter.ready]
    nvrtc.launch(kernel, grid, variant.WARPS * 32, variant.sums, arguments)
    return h


def room_for_x(variant: Variant, x: Any) -> tuple[Any, tuple[int, int, int]]:
    """Where prepare_x is to write (batches, blocks of 64, their rows, 64), blocks in whole groups; its grid."""
    import torch

    batches, blocks = variant.tiles(x.shape[0], 1)[0], groups(x.shape[1]) * GROUP
    return torch.empty(batches, blocks, variant.MT * 8, BLOCK_K, dtype=x.dtype, device=x.device), (blocks, batches, 1)


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
    grid, tiles = variant.grid(rows, weight.n, weight.k, split), variant.tiles(rows, weight.n)
    if 2 * math.prod(tiles) > weight.counters.numel():
        raise ValueError(f"{rows} rows in tiles of {variant.MT * 8}: take a variant of `variants`")
    capability = torch.cuda.get_device_capability(x.device)
    waits = 0 if split < 0 else patience(variant, grid, x.device)
    kernels, threads = compiled(variant, capability), variant.WARPS * 32
    out = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    size = variant.workspace(grid, split) if waits >= 0 else 0
    partial, operand = torch.empty(size, dtype=torch.float32, device=x.device), x
    if variant.prepared:  # before lora_shrink takes memory that it gives back while it may still run
        operand, shape = room_for_x(variant, x)
    h = shrink(x, weight, adapter, adapters, variant, kernels["lora_shrink"]) if adapter else None
    if variant.prepared:
        sizes = [rows, weight.k, x.stride(0)]
        nvrtc.launch(kernels["prepare_x"], shape, threads, 0, [x, operand, *sizes], early=bool(adapter))
    arguments = [
        operand, weight.packed, weight.fixed, out, partial, weight.counters, len(weight.states), rows,
        weight.n, weight.k, x.stride(0), FACTORS[variant.HALF], h,
        *((adapter.b, adapter.rank, adapter.ready) if adapter else (None, 0, None)), waits, int(split < 0),
    ]  # fmt: skip
    early = capability >= (9, 0) and bool(adapter or variant.prepared)
    cluster = grid[2] if waits < 0 else 1
    nvrtc.launch(kernels["nf4_matmul"], grid, threads, variant.shared, arguments, early, cluster)
    return out
