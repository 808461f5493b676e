"""One copy of the weights, and two models over it that say the same."""

import hashlib
import json

import pytest
import torch

import colab_kit as kit
from colab_kit.sharing import base_parameters
from colab_kit.vllm_layers import install_lora

AGREEMENT = """
import colab_kit as kit
kit.enable_standby()
import json, sys, contextlib, torch
settings = kit.Settings(
    model_name_or_path={folder!r}, dtype="float32", lora_r=8, lora_alpha=16, num_generations=2,
    per_device_train_batch_size=8, max_prompt_length=64, max_completion_length=40,
)
policy = kit.load(settings)
prompts = [[5 + (7 * i * j) % 300 for i in range(12)] for j in range(1, 5)]

def largest_difference(adapter):
    request = policy.slot.request if adapter else None
    with policy.standby.awake():
        groups = policy.engine.generate(prompts, n=2, seed=1, temperature=0.7, ignore_eos=True, lora_request=request)
    worst, tokens = 0.0, 0
    for prompt, group in zip(prompts, groups):
        for completion in group:
            ids = torch.tensor([prompt + completion.token_ids])
            without = contextlib.nullcontext() if adapter else policy.model.disable_adapter()
            with torch.no_grad(), without:
                logits = policy.model(input_ids=ids).logits[0].float() / 0.7
            logps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            logps = logps.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            worst = max(worst, (logps - torch.tensor(completion.logprobs)).abs().max().item())
            tokens += len(completion.token_ids)
    return worst, tokens

found = {{"fresh": largest_difference(True)}}
torch.manual_seed(0)
for name, parameter in policy.model.named_parameters():
    if "lora_B" in name:
        parameter.data.normal_(0, 0.05)
policy.sync()
found |= {{"adapter": largest_difference(True), "base": largest_difference(False)}}

def even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

rows = [{{"prompt": f"w{{i}} w{{i + 1}} w{{i + 2}}"}} for i in range(4)]
run = kit.train(policy, rows, even_tokens, settings.replace(max_steps=1, learning_rate=1e-3))
found["grad_norm"] = run.metrics[-1]["grad_norm"]
found["after a step"] = largest_difference(True)
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("shape", "load_in_4bit"),
    [("tiny_llama", True), ("tiny_qwen2", True), ("tiny_qwen3", True), ("tiny_qwen3", False), ("smollm2", False)],
    ids=["llama 4-bit files", "qwen2 4-bit files", "qwen3 4-bit files", "qwen3 16-bit files", "SmolLM2's weights"],
)
def test_every_family_trains_and_its_two_models_agree_in_float32(
    shape, load_in_4bit, tiny_checkpoint, in_fresh_process, capsys
):
    """Log-probabilities of vLLM and of the shared model agree to 1e-4, without, with and beside an adapter, and after a
    step of training."""
    folder = kit.Settings().model_name_or_path if shape == "smollm2" else tiny_checkpoint(shape, load_in_4bit)
    found = in_fresh_process(AGREEMENT.format(folder=folder))
    assert 0 < found.pop("grad_norm") < float("inf")
    with capsys.disabled():
        print(f"\n{shape}: largest difference {json.dumps({key: f'{value[0]:.1e}' for key, value in found.items()})}")
    for largest, tokens in found.values():
        assert largest < 1e-4
        assert tokens == 320


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [[0] * 5, [0, -1, -1, 0, -1], [-1] * 5], ids=["every row", "some rows", "no row"])
def test_on_a_gpu_the_adapter_is_added_to_the_rows_that_have_it(slots, dtype):
    """With the metadata of a GPU and the slices of fused layers, on a CPU."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    install_lora()
    wrapper = PunicaWrapperGPU.__new__(PunicaWrapperGPU)  # its __init__ wants Triton, for the kernels that are replaced
    wrapper.token_mapping_meta = LoRAKernelMeta.make(1, 64, "cpu")
    wrapper.token_mapping_meta.prepare_tensors(torch.tensor(slots))
    x, y, sizes = torch.randn(5, 48).to(dtype), torch.randn(5, 96).to(dtype), (64, 16, 16)
    a, b = [torch.randn(1, 1, 16, 48).to(dtype) for _ in sizes], [torch.randn(1, 1, n, 16).to(dtype) for n in sizes]
    update = torch.cat([x.double() @ m[0, 0].double().T @ n[0, 0].double().T for m, n in zip(a, b, strict=True)], 1)
    expected = y.double() + 2 * update * (torch.tensor(slots)[:, None] >= 0)
    wrapper.add_lora_linear(y, x, a, b, 2.0, sizes)
    assert (y.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_a_gradient_goes_through_the_very_weights_that_the_forward_pass_takes(tiny_policy):
    """In the trainer's dtype, whatever dtype the files' quantization names."""
    layer = tiny_policy.model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    weight = layer(torch.eye(layer.in_features)).T
    x = torch.randn(3, layer.in_features, requires_grad=True)
    y = layer(x)
    slope = torch.randn_like(y)
    y.backward(slope)
    assert tiny_policy.engine.dtype == torch.float32
    assert (x.grad - slope @ weight).norm() < 1e-5 * x.grad.norm()


def storages(model):
    """Address ranges of everything that the engine's parameters and quantization states occupy."""
    tensors = []
    for parameter in model.parameters():
        tensors.append(parameter.data)
        tensors += [state.absmax for state in getattr(parameter, "bnb_quant_state", {}).values()]
    return [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors)]


def test_every_base_weight_lies_in_the_engines_storage(tiny_policy):
    ranges = storages(tiny_policy.engine.model)
    shared = list(base_parameters(tiny_policy.model))
    assert len(shared) > 20
    for name, tensor in shared:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        assert any(low <= start and end <= high for low, high in ranges), name


def test_the_second_model_adds_less_than_a_hundredth_of_the_weights(tiny_policy):
    """Besides the adapter, only the rotary embedding's buffers are its own."""
    own = sum(buffer.numel() * buffer.element_size() for buffer in tiny_policy.model.buffers())
    assert 0 < own < 0.01 * tiny_policy.weight_bytes


def fingerprint(policy):
    digest = hashlib.sha256()
    for _, tensor in base_parameters(policy.model):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_ten_steps_of_training_leave_the_base_weights_untouched(tiny_policy, tiny_rows):
    before = fingerprint(tiny_policy)
    adapter = [p.detach().clone() for p in tiny_policy.model.parameters() if p.requires_grad]
    run = kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=10))
    assert len(run.metrics) == 10
    assert fingerprint(tiny_policy) == before
    moved = [p for p in tiny_policy.model.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(adapter, moved, strict=True))


def even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def test_evaluating_the_shared_model_does_not_repack_the_engines_weights(tiny_policy):
    """bitsandbytes repacks a weight at the first evaluation on CPUs with AVX512-BF16; the engine would read rubbish."""
    before = fingerprint(tiny_policy)
    with torch.no_grad():
        tiny_policy.model.eval()(input_ids=torch.tensor([[0, 5, 6]]))
    assert fingerprint(tiny_policy) == before


def test_the_shared_model_is_bit_for_bit_what_from_pretrained_gives(tiny_policy):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        tiny_policy.settings.model_name_or_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    for module in plain.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # The checkpoint names bfloat16 to compute in; both are asked for float32's arithmetic here.
            module.support_avx512bf16_for_cpu, module.compute_dtype = False, torch.float32
    ids = torch.tensor([[0, *range(5, 45)]])
    shared = tiny_policy.model
    shared.get_base_model().set_attn_implementation("sdpa")
    with torch.no_grad(), shared.disable_adapter():
        assert torch.equal(shared(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path, in_fresh_process):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    code = f"import colab_kit as kit; kit.load(kit.Settings(model_name_or_path={str(tmp_path)!r}))"
    message = "GPT2LMHeadModel; weights can be shared for LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    assert message in in_fresh_process(code, check=False, timeout=60).stderr


def test_sixteen_bit_weights_on_a_cpu_are_refused_with_the_way_out(tiny_checkpoint, in_fresh_process):
    """vLLM packs them into a layout of its own there."""
    code = (
        "import colab_kit as kit; kit.enable_standby(); "
        f"kit.load(kit.Settings(model_name_or_path={tiny_checkpoint('tiny_llama', False)!r}, load_in_4bit=False, "
        "max_completion_length=16, max_prompt_length=16))"
    )
    done = in_fresh_process(code, check=False)
    assert done.returncode
    assert "set load_in_4bit=True, or use a GPU" in done.stderr.strip().splitlines()[-1]
