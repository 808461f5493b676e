"""LoRA: trained by PEFT in float32, copied into vLLM's slot in memory, saved as plain PEFT files."""

from __future__ import annotations

import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .presets import Settings
from .sharing import FUSED

if TYPE_CHECKING:
    from peft import PeftModel

    from .engine import Engine

ADAPTER_ID = 1


def add_adapter(model: nn.Module, settings: Settings) -> PeftModel:
    """Wrap the shared model with a fresh LoRA (B = 0, so the policy starts as the base model). Masters in float32."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.lora_target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.model_name_or_path,
    )
    model.name_or_path = settings.model_name_or_path  # what the adapter's files name as their base
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(settings.seed)
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=True)
    for name, parameter in peft_model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for layer in lora_layers(peft_model).values():
        layer.forward = types.MethodType(lora_forward, layer)
    return peft_model


def lora_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """base(x) + alpha / r * x A^T B^T, the update added by the matrix product itself. PEFT's forward gives the same
    through four more tensors of the output's size, and as many in the backward pass."""
    dropout = layer.lora_dropout["default"]
    if layer.disable_adapters or layer.merged or not isinstance(dropout, nn.Identity):
        return type(layer).forward(layer, x, *args, **kwargs)
    shape, x = x.shape[:-1], x.flatten(0, -2)  # of [1, tokens, width] and a bias torch would return a view
    a, b = (weight.to(x.dtype) for weight in (_a(layer), layer.lora_B["default"].weight))
    low = nn.functional.linear(x, a)
    out = layer.base_layer(x).addmm_(low, b.t(), alpha=layer.scaling["default"])
    return out.view(*shape, -1)


def renew_adapter(peft_model: PeftModel, settings: Settings) -> PeftModel:
    """A fresh adapter of another rank or on other modules, around the same base."""
    return add_adapter(peft_model.unload(), settings)


class Slot:
    """vLLM's side of the adapter: registered once, then overwritten in place after every optimizer step."""

    def __init__(self, engine: Engine, peft_model: PeftModel) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
        if ADAPTER_ID in engine.llm.llm_engine.list_loras():  # of the adapter that this one replaces
            engine.llm.llm_engine.remove_lora(ADAPTER_ID)
        # vLLM registers an adapter from files; this is the only time that any are written for it.
        with tempfile.TemporaryDirectory() as folder:
            peft_model.save_pretrained(folder, save_embedding_layers=False)
            self.request = LoRARequest("policy", ADAPTER_ID, folder)
            engine.llm.llm_engine.add_lora(self.request)
        engine.llm.llm_engine.pin_lora(ADAPTER_ID)
        self.copy_from(peft_model)

    @torch.no_grad()
    def copy_from(self, peft_model: PeftModel) -> None:
        """Copy A and B * alpha / r into the slot and forget cached keys and values, which are the old policy's."""
        manager = self.engine.lora_manager
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        layers = lora_layers(peft_model)
        for name, module in manager.modules.items():
            parent, _, leaf = name.rpartition(".")
            if leaf in FUSED:
                parts = [layers.get(f"{parent}.{part}") for part in FUSED[leaf]]
                if any(parts):
                    module.set_lora(
                        slot, [part and _a(part) for part in parts], [part and _scaled_b(part) for part in parts]
                    )
            elif name in layers:
                module.set_lora(slot, _a(layers[name]), _scaled_b(layers[name]))
        self.engine.reset_prefix_cache()


def lora_layers(peft_model: PeftModel) -> dict[str, Any]:
    """PEFT's LoRA layers by the name that the module has in the base model."""
    from peft.tuners.lora import LoraLayer

    base = peft_model.get_base_model()
    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def _a(layer: Any) -> torch.Tensor:
    return layer.lora_A["default"].weight


def _scaled_b(layer: Any) -> torch.Tensor:
    return layer.lora_B["default"].weight * layer.scaling["default"]


def adapter_update(layer: Any) -> torch.Tensor | None:
    """What the adapter adds to a layer's weight, [out, in] in float32; None for a layer without one."""
    return (_scaled_b(layer) @ _a(layer)).float() if hasattr(layer, "lora_A") else None


def save_adapter(peft_model: PeftModel, tokenizer: Any, folder: str | Path) -> Path:
    """Plain PEFT files and the tokenizer; loads with `PeftModel.from_pretrained` and as a vLLM LoRA."""
    folder = Path(folder)
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    return folder


def adapter_files(peft_model: PeftModel) -> dict[str, bytes]:
    """PEFT's two files, in memory."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    tensors = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    with tempfile.TemporaryDirectory() as folder:
        peft_model.peft_config["default"].save_pretrained(folder)
        config = (Path(folder) / "adapter_config.json").read_bytes()
    content = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return {"adapter_config.json": config, "adapter_model.safetensors": save(content, {"format": "pt"})}


def load_adapter(peft_model: PeftModel, folder: str | Path) -> bool:
    """Read an adapter's values from `folder` (safetensors only) into the trained one. Returns whether that changed it.

    Raises: FileNotFoundError without PEFT's safetensors; ValueError when rank, alpha or modules differ, naming both.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"no adapter_model.safetensors in {folder}: pass a folder that policy.save wrote")
    mine, theirs = peft_model.peft_config["default"], LoraConfig.from_pretrained(str(folder))
    for name, field in (("r", "lora_r"), ("lora_alpha", "lora_alpha")):
        have, want = getattr(mine, name), getattr(theirs, name)
        if have != want:
            raise ValueError(f"the adapter in {folder} has {name}={want}, this policy {have}: set {field} to match")
    for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if getattr(theirs, name, None):
            raise ValueError(f"the adapter in {folder} has {name}, which the kit can't sample with")
    return set_adapter(peft_model, load_file(file), folder)


def set_adapter(peft_model: PeftModel, tensors: dict[str, torch.Tensor], folder: str | Path) -> bool:
    """Values by PEFT's names into the trained adapter. Returns whether one differed. Raises ValueError, before any is
    set, if one does not fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    mine = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    if mine.keys() != tensors.keys():
        modules = [sorted({key.split(".")[-3] for key in keys}) for keys in (tensors, mine)]
        raise ValueError(
            f"the adapter in {folder} has other tensors than this policy's (it adapts {', '.join(modules[0])}; the "
            f"policy {', '.join(modules[1])}): set lora_target_modules and model_name_or_path to match"
        )
    for key, value in tensors.items():
        if value.shape != mine[key].shape:
            raise ValueError(
                f"{key} in {folder} is {tuple(value.shape)}, this policy's is {tuple(mine[key].shape)}: it belongs to "
                f"another model or rank"
            )
    changed = not all(value.equal(mine[key].cpu()) for key, value in tensors.items())
    set_peft_model_state_dict(peft_model, tensors)
    return changed
