"""A 4-bit matrix product for decoding batches, on bitsandbytes' weights as they are (`nf4.cu`).

bitsandbytes unpacks a weight to 16 bits in memory for every product of more than a few rows. The kernel here reads the
packed weight once. It is compiled at run time by NVRTC, which comes with torch, so no CUDA toolkit is needed.

`Products.apply` is what the linear method calls. When it meets a shape for the first time it times the kernel and
bitsandbytes on the layer's own weight, checks that they agree, and keeps to the faster; `summary` says what was chosen
and why. Whatever it doesn't know goes bitsandbytes' way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import nvrtc

BATCHES = (range(1, 2), range(2, 9), range(9, 17), range(17, 33), range(33, 65), range(65, 129))
"""rows of x (sequences that decode together) that share a choice, timed at the fewest: for the kernel all of them take
the same time, for bitsandbytes more take longer. Still more rows go bitsandbytes' way"""
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
        """bytes: the table, and the stages of x"""
        return 256 * 128 + self.STAGES * 4 * self.MT * 8 * 128

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
    8: (Variant(8, 2, 8, 2, 1), Variant(8, 1, 8, 2, 2)),
}
"""by tiles of 8 rows of x; the fastest is chosen by measuring"""


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
def compiled(variant: Variant, capability: tuple[int, int]) -> Any:
    source = Path(__file__).with_name("nf4.cu").read_bytes()
    binary = nvrtc.cubin(source, dataclasses.asdict(variant), capability)
    return nvrtc.load(binary, b"nf4_matmul", variant.shared)


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
    # The smallest tile has 16 rows; two batches of 64 at most.
    counters = torch.zeros(2 * -(-row // 16), dtype=torch.int32, device=packed.device)
    return Weight(packed, row, states[0].shape[1], shards, states[0].code.float().contiguous(), counters, states)


def matmul(x: Any, weight: Weight, variant: Variant, split: int) -> Any:
    """x (rows, K), bfloat16 or float16, on the GPU -> (rows, N) in the same dtype: x W^T. On torch's current stream.

    The same numbers each time: the partial sums of a split K are added in a fixed order.
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
    tensors = (x, weight.packed, weight.shards, weight.code, out, partial, weight.counters)
    values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    values += [ctypes.c_int(v) for v in (weight.shards.shape[0], rows, weight.n, weight.k, x.stride(0))]
    values.append(ctypes.c_float(FACTORS[variant.HALF]))
    arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    kernel = compiled(variant, torch.cuda.get_device_capability(x.device))
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    threads = variant.WARPS * 32
    result = nvrtc.driver().cuLaunchKernel(kernel, *grid, threads, 1, 1, variant.shared, stream, arguments, None)
    nvrtc.check(result, "cuLaunchKernel")
    return out


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median of replaying `call` as a CUDA graph, the GPU's cache overwritten before each, as the other layers do."""
    import torch

    call()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # not torch.cuda.graph, which collects garbage each time
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    cache = torch.empty(torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.fill_(i)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def timings(x: Any, weight: Weight) -> dict[tuple[Variant, int], float]:
    """Seconds of each (variant, split) that may be the fastest for this x and weight."""
    import torch

    rows, processors = x.shape[0], torch.cuda.get_device_properties(x.device).multi_processor_count
    return {
        (variant, split): seconds(functools.partial(matmul, x, weight, variant, split))
        for variant in variants(rows, x.dtype == torch.float16)
        for split in splits(variant, rows, weight.n, weight.k, processors)
    }


class Products:
    """Which product each shape and number of rows takes."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.chosen: dict[tuple, list[tuple[Variant, int] | None]] = {}
        """by (N, K, dtype): for each of BATCHES the kernel's variant and split, or None: bitsandbytes"""
        self.gains: list[float] = []
        """how many times as fast the kernel was, where it was chosen"""
        self.others: dict[str, None] = {}
        """where bitsandbytes was, and why"""
        self.loaded = False
        """the load has said what was chosen; what is chosen afterwards (without CUDA graphs) is printed"""

    def summary(self) -> str | None:
        """What was chosen, in a sentence; None if there was nothing to choose."""
        if not self.gains and not self.others:
            return None
        theirs = "bitsandbytes" + (f" ({'; '.join(self.others)})" if self.others else "")
        if self.gains:
            gain = f"{min(self.gains):.1f} to {max(self.gains):.1f} times as fast"
            theirs = f"the kit's kernel, {gain} as bitsandbytes; else {theirs}"
        return f"4-bit products while decoding: {theirs}"

    def apply(self, layer: Any, x: Any, packed: Any, states: list, other: Callable[[Any], Any]) -> Any:
        """x (rows, K) -> (rows, N), by the kernel where it is faster, else by `other(x)`, bitsandbytes' way."""
        import torch

        rows, half = x.shape[0], x.dtype in (torch.bfloat16, torch.float16)
        if not (self.enabled and x.is_cuda and half and 0 < rows < BATCHES[-1].stop):
            return other(x)
        capturing = torch.cuda.is_current_stream_capturing()
        if not hasattr(layer, "nf4_weight"):
            if capturing:
                return other(x)
            layer.nf4_weight = self.weight(packed, states, torch.cuda.get_device_capability(x.device))
        mine = layer.nf4_weight
        if mine is None:
            return other(x)
        key = (mine.n, mine.k, x.dtype)
        if key not in self.chosen:
            if capturing:
                return other(x)  # nothing can be timed in here; vLLM runs every size once before it captures it
            self.chosen[key] = self.choose(x, mine, other)
            if self.loaded:
                print(self.summary())
        best = self.chosen[key][next(i for i, batch in enumerate(BATCHES) if rows in batch)]
        return matmul(x, mine, *best) if best else other(x)

    def weight(self, packed: Any, states: list, capability: tuple[int, int]) -> Weight | None:
        reason = unsupported(packed, states)
        if capability < (8, 0):
            reason = "the kernel needs an Ampere GPU or a newer one"
        if reason:
            self.others[reason] = None
        return None if reason else weight(packed, states)

    def choose(self, x: Any, mine: Weight, other: Callable[[Any], Any]) -> list[tuple[Variant, int] | None]:
        """For each of BATCHES. A kernel that fails, or whose result is another, is never taken."""
        import torch

        # A warm-up's x may be zeros, which show nothing. The global generators are left alone.
        generator, best = torch.Generator(x.device).manual_seed(0), []
        for batch in BATCHES:
            rows = f"{batch.start} to {batch.stop - 1} rows" if len(batch) > 1 else "1 row"
            where = f"{mine.n} x {mine.k} with {rows}"
            try:
                trial = torch.randn(batch.start, mine.k, dtype=x.dtype, device=x.device, generator=generator)
                usual = seconds(functools.partial(other, trial))
                times = timings(trial, mine)
                fastest = min(times, key=times.get)
                ours, theirs = matmul(trial, mine, *fastest).float(), other(trial).float()
            except Exception as error:  # of the compiler, the driver or the card: decoding goes on without
                self.enabled = False
                self.others[f"the kernel fails here: {error}"] = None
                return [None] * len(BATCHES)
            gap = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()
            taken = gap < 0.02 and times[fastest] < usual
            best.append(fastest if taken else None)
            if taken:
                self.gains.append(usual / times[fastest])
            elif gap < 0.02:
                words = f"{usual * 1e6:.0f} against {times[fastest] * 1e6:.0f} microseconds"
                self.others[f"{where}: {words}"] = None
            else:
                self.others[f"{where}: the kernel's result is off by {gap:.1%}"] = None
        return best
