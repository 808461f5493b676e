"""Random weights of real shapes, for measuring: memory and speed depend on shapes, not on values.

    python -m colab_kit.shapes llama31_8b FOLDER [--16bit] [--no-weights]

writes a checkpoint as the hub has it (bitsandbytes 4-bit safetensors, or 16-bit ones) with a tokenizer whose words are
`w0 w1 ...`, one token each. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip


def _config(
    model_type: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more
):
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type] + "ForCausalLM"
    return {
        "model_type": model_type, "architectures": [architecture], "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "head_dim": hidden // heads, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 1,
    } | more  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "tiny_llama": _config("llama", 64, 128, 2, 2, 1, 512, max_position_embeddings=4096),
    "tiny_qwen2": _config("qwen2", 64, 128, 2, 2, 1, 512, tie_word_embeddings=True),
    "tiny_qwen3": _config("qwen3", 64, 128, 2, 4, 2, 512, head_dim=32),
    "llama31_8b": _config(
        "llama", 4096, 14336, 32, 32, 8, 128256, rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072
    ),
    "llama32_1b": _config(
        "llama", 2048, 8192, 16, 32, 8, 128256, rope_parameters=LLAMA3_ROPE | {"factor": 32.0},
        max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "qwen25_3b": _config(
        "qwen2", 2048, 11008, 36, 16, 2, 151936, max_position_embeddings=32768 + 1024, tie_word_embeddings=True
    ),
    "qwen25_14b": _config("qwen2", 5120, 13824, 48, 40, 8, 152064, max_position_embeddings=32768 + 1024),
    "qwen3_4b": _config("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3_32b": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
}  # fmt: skip


def write_checkpoint(
    name: str, folder: str | Path, *, load_in_4bit: bool = True, weights: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Write a random checkpoint of SHAPES[name] into `folder`, layer by layer; returns the folder.

    `weights=False`: its config and tokenizer only. `changes`: other values of its config, `num_hidden_layers=2` say.
    """
    folder, config = Path(folder), SHAPES[name] | changes
    folder.mkdir(parents=True, exist_ok=True)
    if load_in_4bit:
        config["quantization_config"] = {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        }  # fmt: skip
    if weights:
        _write_weights(config, folder, load_in_4bit, seed)
    config |= {"dtype": "bfloat16", "transformers_version": "5.0.0"}  # older ones are suspected of a wrong tokenizer
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_weights(config: dict[str, Any], folder: Path, load_in_4bit: bool, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    h, kv = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    q, inter = config["num_attention_heads"] * config["head_dim"], config["intermediate_size"]
    index, files = {}, []

    def normal(*shape: int) -> torch.Tensor:
        scale = 0.6 * shape[-1] ** -0.5  # keeps activations near 1 through any depth
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).mul_(scale).bfloat16()

    def write(tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{len(files):05d}.safetensors"
        save_file({key: value.cpu().clone() for key, value in tensors.items()}, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
        files.append(file)

    ones = torch.ones(h, dtype=torch.bfloat16)
    write({"model.embed_tokens.weight": normal(config["vocab_size"], h), "model.norm.weight": ones})
    if not config["tie_word_embeddings"]:
        write({"lm_head.weight": normal(config["vocab_size"], h)})
    linears = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (inter, h), "mlp.up_proj": (inter, h), "mlp.down_proj": (h, inter),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{norm}.weight": ones for norm in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] == "qwen3":
            head = torch.ones(config["head_dim"], dtype=torch.bfloat16)
            tensors |= {f"{prefix}self_attn.{norm}.weight": head for norm in ("q_norm", "k_norm")}
        for module, shape in linears.items():
            weight = normal(*shape)
            if load_in_4bit:
                tensors |= quantized(f"{prefix}{module}.weight", weight)
            else:
                tensors[f"{prefix}{module}.weight"] = weight
            if config["model_type"] == "qwen2" and module[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}{module}.bias"] = normal(1, shape[0])[0] * 0.1
        write(tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def quantized(name: str, weight: Any) -> dict[str, Any]:
    """A weight in the layout of pre-quantized checkpoints: packed nibbles and what its QuantState packs into."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}


def write_tokenizer(folder: Path, vocab_size: int, words: list[str] | None = None) -> None:
    """A word-level tokenizer with `vocab_size` words and a chat template that only joins the messages.

    `words`: the `vocab_size - 2` words after BOS and EOS; `w0 w1 ...` unless given.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbered = [f"w{i}" for i in range(vocab_size - 2)]
    words = ["<bos>", "<eos>"] + (words or numbered)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if words[2:] == numbered:  # transformers reads any Qwen2 tokenizer as BPE, which has no words but these
        fast.add_tokens([AddedToken(word, single_word=True) for word in numbered[:500]])
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--16bit", dest="sixteen", action="store_true")
    parser.add_argument("--no-weights", action="store_true", help="the config and the tokenizer only")
    options = parser.parse_args()
    kept = {"load_in_4bit": not options.sixteen, "weights": not options.no_weights}
    print(write_checkpoint(options.name, options.folder, **kept))
