"""One copy of the weights: a transformers model whose parameters are views of the engine's.

vLLM fuses q/k/v and gate/up into one tensor. Rows of its packed 4-bit tensors are exactly bitsandbytes' own layout, so
a slice of them, with the quantization state that belongs to it, is a `Params4bit`; 16-bit rows are plain slices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

SHAREABLE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def check_shareable(config: Any) -> None:
    """Raises ValueError, before anything is loaded, for an architecture whose tensors sharing does not know."""
    architectures = list(config.architectures or ["unknown"])
    if not set(architectures) & set(SHAREABLE):
        raise ValueError(
            f"model_name_or_path is a {', '.join(architectures)}; weights can be shared for {', '.join(SHAREABLE)}"
        )


class SharedLinear4bit(bnb.nn.Linear4bit):
    """bitsandbytes' layer over a weight that the engine owns: it must never be repacked.

    `Linear4bit` turns its weight into another layout for CPUs with AVX512-BF16 on the first evaluation, and marks the
    quantization state that the engine shares; the engine would then read rubbish. That is switched off here. And its
    backward pass unpacks in the dtype that the state names, the file's: bfloat16 where a T4 trains in float16.
    """

    def __init__(self, weight: torch.Tensor, quant_state: Any, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        rows, columns = quant_state.shape
        quant_state = copy.copy(quant_state)  # around the same tensors
        quant_state.dtype = dtype
        with torch.device("meta"):
            super().__init__(columns, rows, bias=False, compute_dtype=dtype, quant_type=quant_state.quant_type)
        self.weight = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            quant_state=quant_state,
            quant_type=quant_state.quant_type,
            blocksize=quant_state.blocksize,
            compress_statistics=quant_state.nested,
            bnb_quantized=True,
            module=self,
        )
        self.quant_state = quant_state
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.support_avx512bf16_for_cpu = False


def share_weights(engine_model: nn.Module, config: Any, dtype: torch.dtype) -> nn.Module:
    """A transformers causal LM for `config` whose every parameter lies inside `engine_model`'s storages.

    Only the rotary embedding's buffers are new (a few hundred bytes). The model is in eval mode, has no trainable
    parameter, and takes an adapter by PEFT like any 4-bit model.

    Raises: ValueError for an unknown architecture, or where the engine keeps a weight in a layout of its own.
    """
    from transformers import AutoModelForCausalLM

    check_shareable(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    parameters = dict(engine_parameters(engine_model))
    quantized = False
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{name}.weight" in parameters:
            weight, quant_state = parameters[f"{name}.weight"]
            bias, _ = parameters.get(f"{name}.bias", (None, None))
            if quant_state is not None:
                quantized = True
                _replace(model, name, SharedLinear4bit(weight, quant_state, bias, dtype))
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        if name not in parameters and name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name not in parameters:
            raise ValueError(f"the engine has no {name}; weights can be shared for {', '.join(SHAREABLE)}")
        view = parameters[name][0]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            view = view[: parameter.shape[0]]  # vLLM pads the vocabulary
        if view.shape != parameter.shape:
            raise ValueError(
                f"the engine keeps {name} in a layout of its own ({tuple(view.shape)} for {tuple(parameter.shape)}), "
                f"so 16-bit weights can't be shared on this device: set load_in_4bit=True, or use a GPU"
            )
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    with torch.device(model.get_input_embeddings().weight.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.is_loaded_in_4bit = quantized  # PEFT then builds its 4-bit LoRA layers
    model.config.use_cache = False
    return model.eval()


def engine_parameters(engine_model: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, Any]]]:
    """(transformers name, (tensor view, quantization state or None)) for each of the engine's base parameters."""
    for full_name, parameter in engine_model.named_parameters():
        name = full_name.replace(".base_layer.", ".")
        if "lora_" in name:
            continue
        states = getattr(parameter, "bnb_quant_state", None)
        data = parameter.data
        prefix, _, leaf = name.rpartition(".")
        parent, _, module_name = prefix.rpartition(".")
        parts = FUSED.get(module_name)
        if parts is None:
            yield name, (data, states[0] if states else None)
            continue
        module = engine_model.get_submodule(full_name.rpartition(".")[0])
        if states:
            bounds = parameter.bnb_shard_offsets.tolist()
        else:
            bounds = [sum(module.output_sizes[:i]) for i in range(len(parts) + 1)]
        for i, part in enumerate(parts):
            view = data[bounds[i] : bounds[i + 1]] if data.numel() else data
            yield f"{parent}.{part}.{leaf}", (view, states[i] if states else None)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each base (not adapter) parameter and quantization state of a shared model."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            continue
        yield name, parameter.data  # named_parameters gives a tied head once
        if state := getattr(parameter, "quant_state", None):
            yield f"{name}.absmax", state.absmax


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
