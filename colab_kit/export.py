"""A trained policy for others: merged into 16-bit weights, or on the Hugging Face hub."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .adapter import adapter_update

if TYPE_CHECKING:
    from .policy import Policy


@torch.no_grad()
def merge(policy: Policy, folder: str | Path, dtype: str | None = None) -> Path:
    """Base weights plus adapter as one plain checkpoint, with config and tokenizer; loads anywhere, without PEFT.

    4-bit weights are dequantized, B @ A * alpha / r is added in float32, and the sum rounded to `dtype` ("bfloat16",
    or "float16" where the policy runs in that; "float32" is exact and twice as large). One file and one layer at a
    time: the host needs room for a layer, the disk for two bytes a weight.
    """
    from safetensors.torch import save_file

    engine, folder = policy.engine, Path(folder)
    dtype = dtype or ("float16" if engine.dtype == torch.float16 else "bfloat16")
    policy.standby.sleep()
    folder.mkdir(parents=True, exist_ok=True)
    if left := [path.name for path in folder.glob("*.safetensors*")]:
        raise FileExistsError(f"{folder} has {left[0]}: merge into an empty folder, so that no two models mix")
    layers = policy.model.get_base_model().config.num_hidden_layers
    index, size = {}, 0
    for number, tensors in enumerate(merged_layers(policy.model, getattr(torch, dtype))):
        file = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    source = Path(engine.llm.llm_engine.model_config.model)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    for name, content in (
        ("config.json", config | {"dtype": dtype}),
        ("model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))
    if (generation := source / "generation_config.json").exists():
        (folder / generation.name).write_bytes(generation.read_bytes())
    policy.tokenizer.save_pretrained(folder)
    print(f"{folder}: {len(index)} tensors, {size / 2**30:.2f} GiB in {dtype}")
    return folder


def merged_layers(model: Any, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Transformers' names and merged tensors on the host: what lies outside the layers first, then layer by layer."""
    base = model.get_base_model()
    names: dict[str, list[tuple[str, Any]]] = {}
    for full_name, parameter in base.named_parameters():  # tied weights come once
        if "lora_" not in full_name:
            name = full_name.replace(".base_layer.", ".")
            layer = name.split(".")[2] if name.startswith("model.layers.") else ""
            names.setdefault(layer, []).append((name, parameter))
    for layer in sorted(names, key=lambda layer: int(layer or -1)):
        tensors = {}
        for name, parameter in names[layer]:
            module = base.get_submodule(name.rpartition(".")[0])
            tensors[name] = merged(parameter, module if name.endswith(".weight") else None).to(dtype).cpu().contiguous()
        yield tensors


def merged(parameter: Any, module: Any) -> torch.Tensor:
    """One weight, dequantized, with its adapter's update; [out, in], float32 where there is one."""
    from bitsandbytes.functional import dequantize_4bit

    weight, state = parameter.data, getattr(parameter, "quant_state", None)
    if state is not None:
        state = copy.copy(state)
        state.dtype = torch.float32  # the checkpoint's own would round once more
        weight = dequantize_4bit(weight, state)
    update = adapter_update(module)
    return weight.float() + update if update is not None else weight


def push_to_hub(policy: Policy, repo_id: str, token: str | None = None, merged: bool = False) -> str:
    """Uploads the adapter (or the merged model) to huggingface.co/`repo_id`, private if it is new; returns its address.

    `token` None: the one that `huggingface_hub` finds (a notebook's secret, HF_TOKEN, or a login). It is not printed
    or stored.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        merge(policy, folder) if merged else policy.save(folder)
        address = api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder)
    return str(address)
