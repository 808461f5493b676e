"""What leaves the kit gives the same tokens elsewhere: adapters, merged models, the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import ROWS, Reward, adapter, same

import colab_kit as kit


@pytest.fixture
def trained(policy):
    kit.train(policy, ROWS, Reward(), policy.settings.replace(learning_rate=2e-2, lr_scheduler_type="constant"))
    return policy


def sampled(policy, rows=ROWS[:4], **more):
    """The policy's greedy token ids."""
    ids = kit.data.encode_prompts([row["prompt"] for row in rows], policy.tokenizer)
    with policy.standby.awake():
        groups = policy.engine.generate(ids, temperature=0, **({"lora_request": policy.slot.request} | more))
    return [group[0].token_ids for group in groups]


def assert_same_greedy_tokens(model, policy, expected, tie=0.0, rows=ROWS[:4]):
    """Each token is the likeliest after those before it, except where rounding decides between logits within `tie`."""
    compared = 0
    for row, tokens in zip(rows, expected, strict=True):
        ids = torch.tensor([kit.data.encode_prompts([row["prompt"]], policy.tokenizer)[0] + tokens])
        with torch.no_grad():
            scores = model(ids).logits[0, -len(tokens) - 1 : -1].float()
        for score, token in zip(scores, tokens, strict=True):
            best, second = score.topk(2).values
            if best - second > tie:
                assert score.argmax() == token
                compared += 1
    assert compared > 0.5 * sum(map(len, expected))


def logits(model, rows=ROWS[:4]):
    ids = torch.tensor([[2 + (7 * i + 3 * j) % 500 for j in range(24)] for i in range(len(rows))])
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_a_saved_adapter_gives_the_same_tokens_in_peft_and_transformers(trained, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = sampled(trained)
    assert expected != sampled(trained, lora_request=None)
    base = AutoModelForCausalLM.from_pretrained(trained.settings.model_name_or_path, dtype=torch.float32)
    for module in base.modules():
        if hasattr(module, "compute_dtype"):
            # The checkpoint says bfloat16, and so does bitsandbytes' kernel for some CPUs; the policy runs in float32.
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32
            module.support_avx512bf16_for_cpu = False
    model = PeftModel.from_pretrained(base, trained.save(tmp_path / "adapter")).eval()
    assert_same_greedy_tokens(model, trained, expected, tie=1e-4)
    trained.model.get_base_model().set_attn_implementation("sdpa")
    assert kl(logits(trained.model), logits(model)) < 1e-6


def test_a_saved_adapter_can_be_gone_on_from(trained, tmp_path):
    expected, values = trained.sample(ROWS[:4], temperature=0).completions, adapter(trained)
    trained.save(tmp_path / "adapter")
    with torch.no_grad():
        for parameter in trained.model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    trained.sync()
    trained.load_adapter(tmp_path / "adapter")
    assert same(adapter(trained), values)
    assert trained.sample(ROWS[:4], temperature=0).completions == expected


def test_an_adapter_that_does_not_fit_is_refused_whole(trained, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, values = trained.save(tmp_path / "adapter"), adapter(trained)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = sorted(tensors)[-1]
    save_file(tensors | {key: torch.zeros(3, 3)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="another model or rank"):
        trained.load_adapter(folder)
    save_file({name: value for name, value in tensors.items() if name != key}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="other tensors"):
        trained.load_adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        trained.load_adapter(folder)
    assert same(adapter(trained), values)


@pytest.mark.parametrize("dtype, most", [("float32", 1e-6), (None, 1e-3)])
def test_a_merged_model_gives_the_same_tokens_in_plain_transformers(trained, tmp_path, dtype, most):
    from transformers import AutoModelForCausalLM

    expected = sampled(trained)
    folder = trained.merge(tmp_path / "merged", dtype)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert_same_greedy_tokens(model, trained, expected, tie=1e-4 if dtype else 0.02)
    trained.model.get_base_model().set_attn_implementation("sdpa")
    assert kl(logits(trained.model), logits(model)) < most


def test_the_hub_gets_the_files_and_nobody_sees_the_token(trained, monkeypatch, capsys):
    calls = []

    class Hub:
        def __init__(self, token):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            assert options["private"]
            return f"https://huggingface.co/{repo_id}"

        def upload_folder(self, repo_id, folder_path):
            calls.append({path.name for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    address = trained.push_to_hub("me/mine", token="hf_secret")
    trained.push_to_hub("me/mine", token="hf_secret", merged=True)
    out = capsys.readouterr()
    assert address.endswith("me/mine") and "hf_secret" not in out.out + out.err
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= calls[1]
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= calls[3]
