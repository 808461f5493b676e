"""LoRA: trained by PEFT in float32, copied into vLLM's slot in memory, saved as plain PEFT files."""

from __future__ import annotations

import tempfile
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
    return peft_model


class Slot:
    """vLLM's side of the adapter: registered once, then overwritten in place after every optimizer step."""

    def __init__(self, engine: Engine, peft_model: PeftModel) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
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


def save_adapter(peft_model: PeftModel, tokenizer: Any, folder: str | Path) -> Path:
    """Plain PEFT files and the tokenizer; loads with `PeftModel.from_pretrained` and as a vLLM LoRA."""
    folder = Path(folder)
    peft_model.save_pretrained(folder, save_embedding_layers=False)
    tokenizer.save_pretrained(folder)
    return folder


def load_adapter(peft_model: PeftModel, folder: str | Path) -> None:
    """Read an adapter's values from `folder` (safetensors only) into the trained one.

    Raises: ValueError when rank, alpha or modules differ, naming both.
    """
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    mine, theirs = peft_model.peft_config["default"], LoraConfig.from_pretrained(str(folder))
    for name, field in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("target_modules", "lora_target_modules")):
        have, want = getattr(mine, name), getattr(theirs, name)
        if (set(have) != set(want)) if name == "target_modules" else have != want:
            raise ValueError(f"the adapter in {folder} has {name}={want}, this policy {have}: set {field} to match")
    state = load_file(Path(folder) / "adapter_model.safetensors")
    result = set_peft_model_state_dict(peft_model, state)
    if result.unexpected_keys:
        raise ValueError(f"the adapter in {folder} has tensors that this model has no place for: {state.keys()}")
