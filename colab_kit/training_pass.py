"""How a training pass fits: how many tokens it takes at a time, and with which memory devices.

Estimates, from the model's config and the free memory; the coefficients are counts of the tensors that are alive at the
peak of a layer's backward, checked against peaks measured on an H200 (README).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .presets import Settings

GIB = 2**30
TOLERANCE = 1.1
"""how good an estimate is: faster devices are taken where it fits with this factor to spare, and the thriftiest are
refused only where it is over the free memory by as much"""


class Dimensions(NamedTuple):
    """Widths of a Llama-like model; `q`, `kv`: all query heads, all key heads."""

    h: int
    inter: int
    layers: int
    vocab: int
    q: int
    kv: int


def dimensions(config: Any) -> Dimensions:
    h = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or h // config.num_attention_heads
    return Dimensions(
        h, config.intermediate_size, config.num_hidden_layers, config.vocab_size,
        config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim,
    )  # fmt: skip


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    d = dimensions(config)
    return 2 * d.layers * d.kv * itemsize


@dataclasses.dataclass(frozen=True)
class Devices:
    """Which memory devices a training pass uses."""

    gradient_checkpointing: bool = False
    """keep one hidden state a layer, recompute the rest"""
    activation_offloading: bool = False
    """keep them in pinned host memory"""
    mlp_tile_tokens: int | None = None
    expand_kv: bool = False
    """repeat the key and value heads: torch's memory-efficient kernel, the best before sm_80, has no GQA"""
    kept_layers: int = 0
    """of those that would be recomputed, the last so many are not: their activations are kept"""

    def recomputed(self, layers: int) -> int:
        """How many of so many layers are: the first ones."""
        return layers - self.kept_layers if self.gradient_checkpointing else 0

    def __str__(self) -> str:
        attention = f"{'memory-efficient' if self.expand_kv else 'flash'} attention"
        if not self.gradient_checkpointing:
            return f"activations are kept, nothing is recomputed, {attention}"
        place = "in pinned host memory" if self.activation_offloading else "on the card"
        tile = f"in tiles of {self.mlp_tile_tokens:,} tokens" if self.mlp_tile_tokens else "in one piece"
        kept = f"the last {self.kept_layers} layers keep their activations, of the rest " if self.kept_layers else ""
        return f"{kept}one hidden state a layer kept {place}, the MLP {tile}, {attention}"


def activations(config: Any, s: Settings, itemsize: int, tokens: int, devices: Devices, host: int) -> int:
    """Bytes on the card that forward and backward over `tokens` tokens add; `host`: bytes that can be offloaded."""
    d = dimensions(config)
    recomputed = devices.recomputed(d.layers)
    states = recomputed * tokens * d.h * itemsize
    kept = max(states - host, 0) if devices.activation_offloading else states
    kept += (d.layers - recomputed) * layer_activations(config, itemsize, tokens, devices)
    moving = 2 * d.h if devices.activation_offloading else 0  # two hidden states are on their way to or from the host
    attention = tokens * (3.5 * d.h + moving + (10 if devices.expand_kv else 9) * d.q + 4 * d.kv + before_norms(config))
    saved = tokens * (3 * d.h + moving + by_attention(config, devices))
    tile = min(tokens, devices.mlp_tile_tokens or tokens)
    weights = 2 * d.inter * d.h if s.load_in_4bit else 0
    mlp = saved + tile * (5.5 if tile == tokens else 10) * d.inter + weights
    gaps = 1.04 if tokens > 4096 else 1.0  # between blocks of many sizes: what the driver counts over the tensors
    head = s.logprob_chunk_size * d.vocab * 14
    return int(kept + max(itemsize * gaps * max(attention, mlp), head))


def before_norms(config: Any) -> int:
    """Width of the queries and keys that Qwen3 keeps from before their norms."""
    d = dimensions(config)
    return d.q + d.kv if config.model_type == "qwen3" else 0


def by_attention(config: Any, devices: Devices) -> int:
    """Width of what attention keeps for its backward pass: queries, keys, values, and its output."""
    d = dimensions(config)
    return 2 * d.q + 2 * (d.q if devices.expand_kv else d.kv) + before_norms(config)


def layer_activations(config: Any, itemsize: int, tokens: int, devices: Devices) -> int:
    """Bytes that a layer keeps for its backward pass if it is not recomputed: besides attention's, the inputs of both
    norms and of the projections, and gate, silu(gate), up and their product."""
    d = dimensions(config)
    return tokens * itemsize * (4 * d.h + by_attention(config, devices) + 4 * d.inter)


def keep_layers(config: Any, itemsize: int, tokens: int, devices: Devices, needed: int, spare: int):
    """(devices, bytes) with as many layers kept whole as `spare` bytes hold, a tenth of them left free."""
    if devices.activation_offloading or not devices.gradient_checkpointing:
        return devices, needed
    d = dimensions(config)
    each = layer_activations(config, itemsize, tokens, devices) - tokens * d.h * itemsize
    layers = max(int(spare / TOLERANCE - needed) // each, 0)
    if layers >= d.layers:
        return Devices(expand_kv=devices.expand_kv), needed + d.layers * each
    return dataclasses.replace(devices, kept_layers=layers), needed + layers * each


def choose_devices(
    config: Any, s: Settings, itemsize: int, tokens: int, room: int, host: int, expand_kv: bool
) -> tuple[Devices, int]:
    """The fastest devices with which a pass over `tokens` tokens fits into `room` bytes, and its estimated bytes.

    What the settings fix stays fixed. Raises: MemoryError with the longest sequence that would fit.
    """
    tiles = (None,) if tokens <= 8192 else ()  # one piece of more is hardly faster and leaves wide gaps
    order = [*((False, tile) for tile in (*tiles, 4096)), (True, 4096), (True, 1024)]
    recompute, found = s.gradient_checkpointing is not False, []
    for offloading, tile in order if recompute else [(False, None)]:
        if s.activation_offloading is not None and recompute:
            offloading = s.activation_offloading
        devices = Devices(recompute, offloading, s.mlp_tile_tokens or tile, expand_kv)
        found.append((devices, activations(config, s, itemsize, tokens, devices, host)))
        if TOLERANCE * found[-1][1] <= room:
            return found[-1]
    devices, needed = min(found, key=lambda pair: pair[1])
    if needed <= TOLERANCE * room:
        return devices, needed
    longest = 0
    for power in range(20, -1, -1):
        if activations(config, s, itemsize, longest + 2**power, devices, host) <= room:
            longest += 2**power
    raise MemoryError(
        f"a training pass over {tokens:,} tokens needs about {needed / GIB:.1f} GiB and {max(room, 0) / GIB:.1f} are "
        f"there for it: the longest sequence is about {longest:,} tokens. Lower max_completion_length or "
        f"max_prompt_length{f' (or max_tokens_per_micro_batch={tokens:,})' if s.max_tokens_per_micro_batch else ''}"
    )


def micro_batch_tokens(
    config: Any, s: Settings, itemsize: int, room: int | None, expand_kv: bool, spare: int = 0
) -> tuple[int, str]:
    """Tokens that one forward and backward takes, and why; `room` None: on a CPU; `spare`: bytes of it that may keep
    layers from being recomputed, which small micro-batches make the most of."""
    if s.max_tokens_per_micro_batch:
        return s.max_tokens_per_micro_batch, "as set"
    length = s.max_model_length
    if room is None:
        return max(length, 2048), "one sequence of full length, or 2,048"
    devices, layers = Devices(s.gradient_checkpointing is not False, expand_kv=expand_kv), dimensions(config).layers

    def seconds(n: int) -> float:
        """Relative: forward, backward and recomputation take as long as one another; unpacking the weights for each
        micro-batch as long as some 300 tokens."""
        needed = activations(config, s, itemsize, n * length, devices, 0)
        kept, _ = keep_layers(config, itemsize, n * length, devices, needed, spare)
        return (2 + kept.recomputed(layers) / layers) * (1 + 300 / (n * length))

    most = max(min(s.completions_per_step, 8192 // length), 1)
    several = [n for n in range(2, most + 1) if activations(config, s, itemsize, n * length, devices, 0) <= room // 2]
    n = min([1, *several], key=seconds)
    if n > 1:
        return n * length, f"{n} sequences of full length, which fit at once"
    return max(length, 1024), "one sequence of full length"


def expands_kv(s: Settings, capability: tuple[int, int]) -> bool:
    return s.sdpa_backend == "efficient" or capability < (8, 0)


def host_room() -> int:
    """Bytes of system memory that offloaded checkpoints may take: 60% of what is free."""
    import psutil

    return int(psutil.virtual_memory().available * 0.6)
