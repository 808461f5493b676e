"""The memory plan: what will fill the card, from the model's config alone, before anything is downloaded or loaded.

The figures are estimates and say so; the coefficients were fitted to peaks measured on an H200 (README, memory). What
a run really took is in its report, measured by the driver.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .presets import LORA_RANKS, Settings
from .samples import html_table
from .standby import standby_requested
from .training_pass import (
    GIB,
    Devices,
    activations,
    choose_devices,
    dimensions,
    expands_kv,
    host_room,
    kv_bytes_per_token,
    micro_batch_tokens,
)

OVERHEAD_GIB = 1.1
"""CUDA context, kernels' code, CUDA graphs and vLLM's buffers: measured on an H200 (README)"""
MAX_NUM_BATCHED_TOKENS = 2048
"""tokens of a prefill; more at once would be no faster on a small card and take more memory"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Estimated bytes of what a run keeps."""

    weights: int
    lora: int
    """float32 masters, and vLLM's slot"""
    optimizer: int
    """optimizer states, kept from the first step on"""
    overhead: int
    prefill: int
    """a prefill's activations and the sampler's logits, there while generating"""
    gradients: int
    activations: int
    """the training pass over one micro-batch"""
    kv_per_token: int

    @property
    def idle(self) -> int:
        return self.weights + self.lora + self.optimizer + self.overhead

    @property
    def training(self) -> int:
        return self.gradients + self.activations

    def peaks(self, kv_cache: int, standby: bool, trained_before: bool) -> tuple[int, int]:
        """Of the whole process, while generating and while training; without Standby torch keeps the memory of a pass
        that was `trained_before`."""
        generating = self.idle + self.prefill + kv_cache
        training = self.idle + self.training + (0 if standby else kv_cache)
        return max(generating, 0 if standby or not trained_before else training), training


def sizes(config: Any, s: Settings, itemsize: int, on_gpu: bool = True) -> Sizes:
    """All but the activations, which depend on the room that the rest leaves; `itemsize`: bytes of an activation."""
    d = dimensions(config)
    shapes = {
        "q_proj": (d.q, d.h), "k_proj": (d.kv, d.h), "v_proj": (d.kv, d.h), "o_proj": (d.h, d.q),
        "gate_proj": (d.inter, d.h), "up_proj": (d.inter, d.h), "down_proj": (d.h, d.inter),
    }  # fmt: skip
    linear = d.layers * sum(rows * columns for rows, columns in shapes.values())
    # 4 bits a weight and a float32 scale for each 64; the embedding and the head stay in 16 bits
    weights = linear * (0.5 + 4 / 64 if s.load_in_4bit else itemsize)
    weights += d.vocab * d.h * itemsize * (1 if config.tie_word_embeddings else 2)
    trained = d.layers * s.lora_r * sum(sum(shapes[name]) for name in s.lora_target_modules)
    slot = d.layers * slot_rank(s, on_gpu) * sum(map(sum, shapes.values()))  # whatever modules are trained
    prefill = itemsize * (MAX_NUM_BATCHED_TOKENS * (4 * d.inter + 4 * d.h) + d.inter * d.h * s.load_in_4bit)
    return Sizes(
        weights=int(weights),
        lora=trained * 4 + slot * itemsize,
        optimizer=trained * (2 if on_gpu and s.optim != "adamw_torch" else 8),
        overhead=int(OVERHEAD_GIB * GIB) if on_gpu else 0,
        prefill=prefill + sequences(s) * d.vocab * 16 if on_gpu else 0,
        gradients=trained * 4,
        activations=0,
        kv_per_token=kv_bytes_per_token(config, itemsize),
    )


def slot_rank(s: Settings, on_gpu: bool) -> int:
    """Of vLLM's slot for the adapter; on a GPU 32 at least, which nf4.cu takes at a time."""
    return next(rank for rank in LORA_RANKS if rank >= max(s.lora_r, 32 if on_gpu else 1))


def sequences(s: Settings) -> int:
    """Completions generated at a time, at most."""
    return s.vllm_max_num_seqs or min(s.completions_per_step, 64)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was chosen, why, and what fills the memory in the three ways of running."""

    settings: Settings
    dtype: str
    sizes: Sizes
    kv_cache_bytes: int
    reasons: tuple[str, ...]

    @property
    def columns(self) -> dict[str, list[str]]:
        s, kv = self.sizes, self.kv_cache_bytes
        resident = max(s.peaks(kv, standby=False, trained_before=True))
        ways = {
            "two engines": (2 * s.weights, kv, s.training, resident + s.weights),
            "shared weights": (s.weights, kv, s.training, resident),
            "shared + Standby": (s.weights, kv, s.training, max(s.peaks(kv, standby=True, trained_before=True))),
        }
        rows = ["weights", "KV cache", "training pass", "LoRA, optimizer, context, graphs", "needed at the peak"]
        table = {"GiB, estimated": rows}
        for way, (weights, cache, training, peak) in ways.items():
            values = (weights, cache, training, s.idle - s.weights, peak)
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
    if not on_gpu and settings.vllm_attention_backend:
        raise ValueError(
            f"vllm_attention_backend={settings.vllm_attention_backend!r} needs a GPU and none is here: choose a "
            f"runtime with one (Colab: Runtime, Change runtime type), or take presets.QUICKSTART, which runs on a CPU"
        )
    itemsize = getattr(torch, dtype).itemsize
    length = settings.max_model_length
    window = getattr(config, "max_position_embeddings", length)
    if length > window:
        raise ValueError(f"{length} tokens a sequence are asked for (max_prompt_length + max_completion_length, or "
                         f"vllm_max_model_length), the model's window has {window}")  # fmt: skip
    s = sizes(config, settings, itemsize, on_gpu)
    kv, reason = kv_cache(settings, s, free, total, on_gpu)
    reasons.append(reason)
    expand = on_gpu and expands_kv(settings, capability)
    room = (free if on_gpu else total) - s.idle - s.gradients - (0 if standby_requested() else kv)
    if on_gpu:
        tokens, _ = micro_batch_tokens(config, settings, itemsize, room, expand)
        _, needed = choose_devices(config, settings, itemsize, tokens, room, host_room(), expand)
    else:
        tokens, _ = micro_batch_tokens(config, settings, itemsize, None, expand)
        needed = activations(config, settings, itemsize, tokens, Devices(), 0)
        if s.idle > free:
            raise MemoryError(
                f"{settings.model_name_or_path} needs about {s.idle / GIB:.1f} GiB of system memory and "
                f"{free / GIB:.1f} are free: choose a smaller model (presets.QUICKSTART), or a runtime with a GPU"
            )
    return Plan(settings, dtype, dataclasses.replace(s, activations=needed), kv, tuple(reasons))


def kv_cache(settings: Settings, s: Sizes, free: int, total: int, on_gpu: bool) -> tuple[int, str]:
    """Bytes of the KV cache, and why.

    Raises: MemoryError where not one sequence fits beside the rest, with the longest that does.
    """
    length, share = settings.max_model_length, settings.vllm_gpu_memory_utilization
    block = 16 if on_gpu else 128  # vLLM hands out the cache in blocks, and keeps one for itself
    needed = s.kv_per_token * (sequences(settings) * -(-length // block) + 2) * block
    if not on_gpu:
        return needed, f"KV cache {needed / GIB:.2f} GiB: room for one step's completions at full length"
    generating = s.idle + s.prefill
    limit = free if share is None else min(share * total, free)
    room = int(limit - generating)
    if room < s.kv_per_token * (length + 2 * block):
        longest = max(room // s.kv_per_token - 2 * block, 0)
        advice = f"the longest sequence is {longest:,} tokens: lower max_completion_length or max_prompt_length"
        if longest < 256:
            advice = "choose a smaller model (presets.QUICKSTART fits any card), or free what another process holds"
        if share is not None and free > limit:
            advice += f", or raise vllm_gpu_memory_utilization={share}"
        raise MemoryError(
            f"{settings.model_name_or_path} needs about {generating / GIB:.1f} GiB before the KV cache, and this GPU "
            f"has {free / GIB:.1f} of {total / GIB:.1f} GiB free: {advice}"
        )
    kv = int(0.95 * room)  # where all that is free is what limits it
    if share is not None and share * total > free:
        return kv, (
            f"KV cache {kv / GIB:.2f} GiB: vllm_gpu_memory_utilization={share} asks for {share * total / GIB:.2f} in "
            f"all and only {free / GIB:.2f} are free, of which the rest takes {generating / GIB:.2f}"
        )
    if share is not None:
        return room, f"KV cache {room / GIB:.2f} GiB: vllm_gpu_memory_utilization={share}, as set, of which the rest " \
                     f"takes {generating / GIB:.2f}"  # fmt: skip
    if needed > 0.95 * room:
        return kv, (
            f"KV cache {kv / GIB:.2f} GiB (utilization {(generating + kv) / total:.2f}): what the card has left, room "
            f"for {kv // s.kv_per_token // length} of {sequences(settings)} completions at full length at a time"
        )
    return needed, (
        f"KV cache {needed / GIB:.2f} GiB (utilization {(generating + needed) / total:.2f}): room for one step's "
        f"completions at full length"
    )
