"""Which 4-bit product each layer takes while decoding: nf4.py's or bitsandbytes'.

`Products.apply` is what the linear method calls. When it meets a shape for the first time it times both on the layer's
own weight, checks that they agree, and keeps to the faster; `summary` says what was chosen and why. Whatever nf4.py
doesn't know goes bitsandbytes' way. An adapter's update is added in the same product where the kernel does it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

from .nf4 import Adapter, Weight, adapter, binary, matmul, unsupported, weight
from .nf4_variants import Variant, splits, variants

BATCHES = (range(1, 2), range(2, 9), range(9, 17), range(17, 33), range(33, 65), range(65, 129))
"""rows of x (sequences that decode together) that share a choice, timed at the fewest: for the kernel all of them take
the same time, for bitsandbytes more take longer. Still more rows go bitsandbytes' way"""


class Products:
    """Which product each shape and number of rows takes."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.chosen: dict[tuple, list[tuple[Variant, int] | None]] = {}
        """by (N, K, dtype, adapter's rank): for each of BATCHES the kernel's variant and split; None: bitsandbytes"""
        self.gains: list[float] = []
        """how many times as fast the kernel was, where it was chosen"""
        self.others: dict[str, None] = {}
        """where bitsandbytes was, and why"""
        self.loaded = False
        """the load has said what was chosen; what is chosen afterwards (without CUDA graphs) is printed"""
        self.update: tuple | None = None
        """The next layer's adapter and its rows' slots (None: no row has it); whoever adds it sets this to None"""

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
        given, slots = self.update or (None, None)
        if given and len(given.a) != len(mine.states):
            given = slots = None
        key = (mine.n, mine.k, x.dtype, given.rank if given else 0)
        if key not in self.chosen:
            if capturing:
                return other(x)  # nothing can be timed in here; vLLM runs every size once before it captures it
            self.chosen[key] = self.choose(x, mine, other, given)
            if self.loaded:
                print(self.summary())
        best = self.chosen[key][next(i for i, batch in enumerate(BATCHES) if rows in batch)]
        if not best:
            return other(x)
        if slots is None:
            return matmul(x, mine, *best)
        self.update = None
        return matmul(x, mine, *best, given, slots)

    def update_of(self, layer: Any, x: Any) -> tuple | None:
        """vLLM's LoRA layer's adapter and the slots of x's rows (rows, K), or None for the slots if no row has it; None
        if nf4.cu can't add it."""
        import torch

        if not self.enabled or not x.is_cuda or x.dim() != 2:
            return None
        if not hasattr(layer, "nf4_adapter"):
            if torch.cuda.is_current_stream_capturing():
                return None
            matrices = [[stacked[0, 0] for stacked in some] for some in (layer.lora_a_stacked, layer.lora_b_stacked)]
            layer.nf4_adapter = adapter(*matrices)
        meta = layer.punica_wrapper.token_mapping_meta
        slots = None if meta.no_lora_flag_cpu.item() else meta.token_lora_mapping
        return (layer.nf4_adapter, slots) if layer.nf4_adapter else None

    def expect(self, dtype: Any) -> None:
        """A 4-bit model of this dtype is about to be loaded: compile what it may need meanwhile."""
        import torch

        if self.enabled and torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) >= (8, 0):
            for batch in BATCHES:
                for variant in variants(batch.start, dtype == torch.float16, capability):
                    binary(variant, capability)

    def weight(self, packed: Any, states: list, capability: tuple[int, int]) -> Weight | None:
        reason = unsupported(packed, states)
        if capability < (8, 0):
            reason = "the kernel needs an Ampere GPU or a newer one"
        if reason:
            self.others[reason] = None
        return None if reason else weight(packed, states)

    def choose(
        self, x: Any, mine: Weight, other: Callable[[Any], Any], given: Adapter | None = None
    ) -> list[tuple[Variant, int] | None]:
        """For each of BATCHES the kernel that is the fastest with the layer's adapter, if it has one, and without it
        faster than bitsandbytes. One that fails, or whose result is another, is never taken."""
        import torch

        # A warm-up's x may be zeros, which show nothing. The global generators are left alone.
        generator, best = torch.Generator(x.device).manual_seed(0), []
        for batch in BATCHES:
            rows = f"{batch.start} to {batch.stop - 1} rows" if len(batch) > 1 else "1 row"
            where = f"{mine.n} x {mine.k} with {rows}"
            try:
                trial = torch.randn(batch.start, mine.k, dtype=x.dtype, device=x.device, generator=generator)
                usual = seconds(functools.partial(other, trial))
                times = timings(trial, mine, given)
                fastest = min(times, key=times.get)
                own = seconds(functools.partial(matmul, trial, mine, *fastest)) if given else times[fastest]
                pairs = {"": (matmul(trial, mine, *fastest).float(), other(trial).float())}
                if given:
                    pairs[" with an adapter"] = adapted(trial, mine, *fastest, given.rank, generator)
                gaps = {what: ((a - b).norm() / b.norm().clamp_min(1e-30)).item() for what, (a, b) in pairs.items()}
            except Exception as error:  # of the compiler, the driver or the card: decoding goes on without
                self.enabled = False
                self.gains.clear()  # what was chosen before goes bitsandbytes' way, too
                self.others[f"the kernel fails here: {error}"] = None
                return [None] * len(BATCHES)
            reason = next(
                (f"its result{what} is off by {gap:.1%}" for what, gap in gaps.items() if not gap < 0.02), None
            )
            if not reason and own >= usual:
                reason = f"{usual * 1e6:.0f} against {own * 1e6:.0f} microseconds"
            if reason:
                self.others[f"{where}: {reason}"] = None
            else:
                self.gains.append(usual / own)
            best.append(None if reason else fastest)
        torch.cuda.empty_cache()
        return best


def adapted(x: Any, weight: Weight, variant: Variant, split: int, rank: int, generator: Any) -> tuple[Any, Any]:
    """The kernel's product of x (rows, K) with a random adapter that every second row has, and what it is to be, by
    torch: (rows, N) each, float32. Its own product without an adapter counts as right here."""
    import torch

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=x.dtype, device=x.device, generator=generator)

    a = [draw(rank, weight.k) / weight.k**0.5 for _ in weight.states]
    b = [draw(state.shape[0], rank) for state in weight.states]
    slots = -(torch.arange(len(x), dtype=torch.int32, device=x.device) % 2)
    right = matmul(x, weight, variant, split).float()
    update = torch.cat([x.float() @ m.float().T @ n.float().T for m, n in zip(a, b, strict=True)], dim=1)
    return matmul(x, weight, variant, split, adapter(a, b), slots).float(), right + update * (slots >= 0)[:, None]


def seconds(call: Callable[[], Any], repeats: int = 7, calls: int = 4) -> float:
    """Median of replaying `calls` calls as a CUDA graph, each after a read of twice the GPU's cache, less the same
    graph without them: the weight comes from memory, as among other layers, and the graph's launch does not count."""
    import torch

    call()
    torch.cuda.empty_cache()  # torch can't while it captures, and keeps what earlier graphs took until it does
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
        try:
            for _ in range(calls):
                torch.amax(cache, 0, out=most)
                call()
        finally:  # or the whole process would stay in the middle of it
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


def timings(x: Any, weight: Weight, given: Adapter | None = None) -> dict[tuple[Variant, int], float]:
    """Seconds of each (variant, split) that may be the fastest for this x and weight, with an adapter for every row."""
    import torch

    rows, half, card = x.shape[0], x.dtype == torch.float16, torch.cuda.get_device_properties(x.device)
    update = (given, torch.zeros(rows, dtype=torch.int32, device=x.device)) if given else ()
    return {
        (variant, split): seconds(functools.partial(matmul, x, weight, variant, split, *update))
        for variant in variants(rows, half, (card.major, card.minor))
        if variant.taken <= card.shared_memory_per_block_optin
        for split in splits(variant, rows, weight.n, weight.k, card.multi_processor_count)
    }
