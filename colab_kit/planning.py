"""The memory plan: what will fill the card, from the model's config alone, before anything is downloaded or loaded.

The figures are estimates and say so; the coefficients were fitted to peaks measured on an H200 (README, memory). What
a run really took is in its report, measured by the driver.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .presets import Settings
from .samples import html_table

GIB = 2**30
OVERHEAD_GIB = 1.8
"""CUDA context, kernels, CUDA graphs and vLLM's buffers: measured for Llama-3.1-8B on an H200"""
MLP_TILE = 4096
"""tokens that the MLP takes at a time while training on a GPU"""


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Estimated bytes of what a run keeps."""

    weights: int
    lora: int
    """float32 masters, and vLLM's slot"""
    optimizer: int
    """optimizer states and gradients, there while training"""
    activations: int
    """the training pass over one micro-batch"""
    overhead: int
    kv_per_token: int

    @property
    def idle(self) -> int:
        return self.weights + self.lora + self.overhead

    @property
    def training(self) -> int:
        return self.optimizer + self.activations


def sizes(config: Any, settings: Settings, itemsize: int, tokens: int, on_gpu: bool = True) -> Sizes:
    """For a training pass over `tokens` tokens; `itemsize`: bytes of an activation."""
    h, inter, layers, vocab = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size,
    )  # fmt: skip
    head_dim = getattr(config, "head_dim", None) or h // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        "q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q),
        "gate_proj": (inter, h), "up_proj": (inter, h), "down_proj": (h, inter),
    }  # fmt: skip
    linear = layers * sum(rows * columns for rows, columns in shapes.values())
    # 4 bits a weight and a float32 scale for each 64; the embedding and the head stay in 16 bits
    weights = linear * (0.5 + 4 / 64 if settings.load_in_4bit else itemsize)
    weights += vocab * h * itemsize * (1 if config.tie_word_embeddings else 2)
    trained = layers * settings.lora_r * sum(sum(shapes[name]) for name in settings.lora_target_modules)
    head = settings.logprob_chunk_size * vocab * 14
    if on_gpu:
        attention = itemsize * tokens * (12 * h + 6 * q)
        tile = min(tokens, MLP_TILE)
        mlp = itemsize * (8 * inter * tile + 2 * inter * h)
        activations = max(attention, mlp) + head
    else:
        activations = (
            layers * tokens * itemsize * (8 * h + 4 * q + 5 * inter) + settings.logprob_chunk_size * vocab * 14
        )
    return Sizes(
        weights=int(weights),
        lora=trained * (4 + itemsize),
        optimizer=trained * (4 + (2 if on_gpu else 8)),
        activations=int(activations),
        overhead=int(OVERHEAD_GIB * GIB) if on_gpu else 0,
        kv_per_token=kv_bytes_per_token(config, itemsize),
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was chosen, why, and what fills the memory in the three ways of running."""

    settings: Settings
    dtype: str
    sizes: Sizes
    kv_cache_bytes: int | None
    """None: vllm_gpu_memory_utilization was given, and vLLM sizes the cache by it"""
    max_num_batched_tokens: int
    free_bytes: int
    total_bytes: int
    reasons: tuple[str, ...]

    @property
    def columns(self) -> dict[str, list[str]]:
        s, kv = self.sizes, self.kv_cache_bytes or 0
        asleep, awake, resident = s.idle + s.training, s.idle + kv, s.idle + s.training + kv
        ways = {
            "two engines": (2 * s.weights, kv, s.training, resident + s.weights),
            "shared weights": (s.weights, kv, s.training, resident),
            "shared + Standby": (s.weights, kv, s.training, max(asleep, awake)),
        }
        rows = ["weights", "KV cache", "training", "LoRA, context, graphs", "needed at the peak"]
        table = {"GiB, estimated": rows}
        for way, (weights, cache, training, peak) in ways.items():
            values = (weights, cache, training, s.lora + s.overhead, peak)
            table[way] = [f"{value / GIB:.2f}" for value in values]
        return table

    def __str__(self) -> str:
        columns = self.columns
        widths = [max(len(name), *(len(value) for value in values)) for name, values in columns.items()]
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*self.reasons, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "<br>".join(self.reasons) + html_table(self.columns)


def plan(settings: Settings) -> Plan:
    """The plan for these settings on this machine. Reads the model's config.json only.

    Raises: FileNotFoundError for an unknown model; ValueError for an architecture that can't be shared; MemoryError
    where the card can't hold it, with the longest sequence that it could.
    """
    from transformers import AutoConfig

    from .sharing import check_shareable
    from .sources import config_source

    config = AutoConfig.from_pretrained(config_source(settings.model_name_or_path))
    check_shareable(config)
    return make_plan(settings, config, *machine())


def machine() -> tuple[int, int, tuple[int, int] | None]:
    """(free bytes, total bytes, compute capability) of the GPU; of the system memory and None without one."""
    import torch

    if torch.cuda.is_available():
        return *torch.cuda.mem_get_info(), torch.cuda.get_device_capability()
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total, None


def make_plan(settings: Settings, config: Any, free: int, total: int, capability: tuple[int, int] | None) -> Plan:
    """The plan for a card (or, with `capability` None, a CPU) with so many bytes free."""
    import torch

    on_gpu, reasons = capability is not None, []
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if not on_gpu else "bfloat16" if capability >= (8, 0) else "float16"
        why = {"float32": "exact, and no slower on a CPU", "bfloat16": "the card has it"}
        reasons.append(f"dtype={dtype}: {why.get(dtype, 'the card has no bfloat16')}")
    elif dtype == "bfloat16" and on_gpu and capability < (8, 0):
        raise ValueError("dtype=bfloat16, but this GPU has no bfloat16: set dtype='float16' or 'auto'")
    itemsize = getattr(torch, dtype).itemsize
    length = settings.max_model_length
    window = getattr(config, "max_position_embeddings", length)
    if length > window:
        raise ValueError(f"{length} tokens a sequence are asked for (max_prompt_length + max_completion_length, or "
                         f"vllm_max_model_length), the model's window has {window}")  # fmt: skip
    tokens = settings.max_tokens_per_micro_batch or max(2048, length)
    s = sizes(config, settings, itemsize, tokens, on_gpu)
    room = free - s.idle
    if on_gpu and room < s.kv_per_token * length:
        longest = max(room // s.kv_per_token, 0)
        advice = f"the longest sequence is {longest:,} tokens: lower max_completion_length or max_prompt_length"
        if longest < 256:
            advice = "choose a smaller model (presets.QUICKSTART fits any card), or free what another process holds"
        raise MemoryError(
            f"{settings.model_name_or_path} needs about {s.idle / GIB:.1f} GiB before the KV cache, and this GPU has "
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB free: {advice}"
        )
    seqs = settings.vllm_max_num_seqs or min(settings.completions_per_step, 64)
    block = 16 if on_gpu else 128  # vLLM hands out the cache in blocks, and keeps one for itself
    needed = s.kv_per_token * (seqs * -(-length // block) + 2) * block
    kv: int | None = needed
    if settings.vllm_gpu_memory_utilization is not None and on_gpu:
        kv = None
        reasons.append(
            f"vllm_gpu_memory_utilization={settings.vllm_gpu_memory_utilization}, as set: vLLM sizes the cache"
        )
    elif on_gpu and needed > 0.95 * room:
        kv = int(0.95 * room)
        share = (s.idle + kv) / total
        reasons.append(
            f"KV cache {kv / GIB:.2f} GiB (utilization {share:.2f}): what the card has left, room for "
            f"{kv // s.kv_per_token // length} of {seqs} completions at full length at a time"
        )
    else:
        share = f" (utilization {(s.idle + kv) / total:.2f})" if on_gpu else ""
        reasons.append(f"KV cache {kv / GIB:.2f} GiB{share}: room for one step's completions at full length")
    # A prefill of more tokens at once would be no faster on a small card and take more memory.
    return Plan(settings, dtype, s, kv, 2048, free, total, tuple(reasons))
