"""Memory: the plan before anything is loaded, the ledger while it runs, the savings at the end."""

from __future__ import annotations

import dataclasses
from typing import Any

from .presets import Settings


@dataclasses.dataclass
class MemoryChoice:
    dtype: str
    kv_cache_bytes: int | None
    reasons: list[str]

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def choose_memory(settings: Settings, config: Any) -> MemoryChoice:
    import torch

    reasons = []
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32"
        reasons.append("dtype=float32: this machine has no GPU, and float32 is exact and no slower on a CPU")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * getattr(torch, dtype).itemsize
    tokens = (settings.vllm_max_num_seqs or min(settings.completions_per_step, 64)) * settings.max_model_length
    kv = per_token * (tokens + 256)
    reasons.append(f"KV cache {kv / 2**30:.2f} GiB: room for one step's completions at full length")
    return MemoryChoice(dtype, kv, reasons)
