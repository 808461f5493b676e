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

    def __str__(self) -> str:
        if not self.gradient_checkpointing:
            return "activations are kept, nothing is recomputed"
        place = "in pinned host memory" if self.activation_offloading else "on the card"
        tile = f"in tiles of {self.mlp_tile_tokens:,} tokens" if self.mlp_tile_tokens else "in one piece"
        attention = "memory-efficient" if self.expand_kv else "flash"
        return f"one hidden state a layer kept {place}, the MLP {tile}, {attention} attention"


def activations(config: Any, s: Settings, itemsize: int, tokens: int, devices: Devices, host: int) -> int:
    """Bytes on the card that forward and backward over `tokens` tokens add; `host`: bytes that can be offloaded."""
    d = dimensions(config)
    head = s.logprob_chunk_size * d.vocab * 14
    if not devices.gradient_checkpointing:
        return d.layers * tokens * itemsize * (8 * d.h + 4 * d.q + 5 * d.inter) + head
    states = d.layers * tokens * d.h * itemsize
    kept = max(states - host, 0) if devices.activation_offloading else states
    normed = (d.q + d.kv) * (config.model_type == "qwen3")  # queries and keys before their norms
    attention = tokens * (6 * d.h + (10 if devices.expand_kv else 9) * d.q + 4 * d.kv + normed)
    saved = tokens * (5 * d.h + 2 * d.q + 2 * (d.q if devices.expand_kv else d.kv) + normed)
    tile = min(tokens, devices.mlp_tile_tokens or tokens)
    weights = 2 * d.inter * d.h if s.load_in_4bit else 0
    mlp = saved + tile * (5.5 if tile == tokens else 11) * d.inter + weights
    gaps = 1.04 if tokens > 4096 else 1.0  # between blocks of many sizes: what the driver counts over the tensors
    return int(kept + max(itemsize * gaps * max(attention, mlp), head))


def choose_devices(
    config: Any, s: Settings, itemsize: int, tokens: int, room: int, host: int, expand_kv: bool
) -> tuple[Devices, int]:
    """The fastest devices with which a pass over `tokens` tokens fits into `room` bytes, and its estimated bytes.

    What the settings fix stays fixed. Raises: MemoryError with the longest sequence that would fit.
    """
    tiles = (None,) if tokens <= 8192 else ()  # one piece of more is hardly faster and leaves wide gaps
    order = [*((False, tile) for tile in (*tiles, 4096)), (True, 4096), (True, 1024)]
    found = []
    for offloading, tile in order:
        if s.activation_offloading is not None:
            offloading = s.activation_offloading
        devices = Devices(True, offloading, s.mlp_tile_tokens or tile, expand_kv)
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


def micro_batch_tokens(config: Any, s: Settings, itemsize: int, room: int | None, expand_kv: bool) -> tuple[int, str]:
    """Tokens that one forward and backward takes, and why; `room` None: on a CPU."""
    if s.max_tokens_per_micro_batch:
        return s.max_tokens_per_micro_batch, "as set"
    length = s.max_model_length
    if room is None:
        return max(length, 2048), "one sequence of full length, or 2,048"
    several = min(s.completions_per_step * length, max(length, 8192))
    plain = Devices(True, expand_kv=expand_kv)
    if several > length and activations(config, s, itemsize, several, plain, 0) <= room // 2:
        return several, f"{several // length} sequences of full length, which fit at once"
    return max(length, 1024), "one sequence of full length"


def expands_kv(s: Settings, capability: tuple[int, int]) -> bool:
    return s.sdpa_backend == "efficient" or capability < (8, 0)


def host_room() -> int:
    """Bytes of system memory that offloaded checkpoints may take: 60% of what is free."""
    import psutil

    return int(psutil.virtual_memory().available * 0.6)
