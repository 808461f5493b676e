"""The same batch through TRL's own GRPOTrainer and through this kit: same advantages, ratios, loss and gradient.

Nothing of TRL is re-implemented or replaced but the generation itself, which returns a fixed batch. TRL's trainer
then scores it, pads, masks, computes its log-probs, its importance ratios and `_compute_loss`, on a two-layer Llama.
The kit starts from the same token ids, rewards and sampler log-probs.

Where the kit differs on purpose:
- bnpo, and grpo over micro-batches of unequal size: TRL divides by what the micro-batch holds, the kit by what the
  step holds, so that a result does not depend on the split. Over one micro-batch, or with totals counted for it, both
  agree (`test_accumulated_micro_batches_are_trl_s_accumulation`).
- With vLLM, TRL computes the old log-probs in an extra forward even when they are the present ones. The kit passes
  None: the ratio is 1 either way. The on-policy cases below compare exactly that.
- TRL finds truncated completions by their last id being neither EOS nor pad, the kit by vLLM's finish reason.
"""

import copy
import itertools

import pytest
import torch

from colab_kit.grpo import (
    StepTotals,
    chunked_logprobs,
    completion_targets,
    finalize_metrics,
    group_advantages,
    loss_mask,
    pad,
    policy_loss,
    sampling_ratio,
    truncated,
)
from colab_kit.presets import LOSS_TYPES, Settings

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

torch.set_num_threads(1)
PAD, EOS = 61, 62
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}

PROMPTS = [[1, 2, 3]] * 2 + [[4, 5]] * 2 + [[6]] * 2
COMPLETIONS = [[7, 8, 9, EOS], [10, 11, 12, 13, 14, 15], [EOS], [16, 17, EOS], [18, 19, 20, 21, EOS], [22, 23, EOS]]
FINISH_REASONS = ["stop", "length", "stop", "stop", "stop", "stop"]
REWARDS = [[1.0, 0.5], [0.0, None], [None, None], [0.25, -1.0], [0.5, 0.5], [2.0, 0.0]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(folder of a tiny model, a tokenizer whose words are w0, w1, ..., a dataset)"""
    words = {f"w{i}": i for i in range(61)} | {"<pad>": PAD, "<eos>": EOS, "<unk>": 63}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder, tokenizer, datasets.Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5"]})


def first_reward(completions, **kwargs):
    return [row[0] for row in REWARDS]


def second_reward(completions, **kwargs):
    return [row[1] for row in REWARDS]


def make_trainer(parts, tmp_path, changes):
    folder, tokenizer, dataset = parts
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, num_generations=2,
        max_completion_length=6, gradient_checkpointing=False, **{"per_device_train_batch_size": 6, **changes},
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=[first_reward, second_reward],
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def kit_settings(changes):
    return Settings(num_generations=2, per_device_train_batch_size=6, max_completion_length=6, **changes)


def sampler_logps(logps):
    """vLLM's, as it were: the trainer's with a noise that pushes some ratios beyond every bound."""
    rng = torch.Generator().manual_seed(1)
    return [row + 0.8 * torch.randn(row.shape, generator=rng) for row in logps]


def kit_logps(model, settings):
    """Per-sample completion log-probs from hidden states, one sample at a time: no padding at all."""
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor(prompt + completion)
        hidden, targets = completion_targets(model.model(ids[None]).last_hidden_state[0], ids, len(prompt))
        logps, _ = chunked_logprobs(
            hidden, model.lm_head.weight, targets, temperature=settings.temperature, chunk_size=2
        )
        rows.append(logps)
    return rows


def score_with_trl(trainer, sampled):
    """TRL's `_generate_and_score_completions` on the fixed batch; with sampler log-probs it takes the vLLM path."""
    texts = ["text"] * len(PROMPTS)
    logps = None if sampled is None else [row.tolist() for row in sampled]
    trainer._generate = lambda prompts: (PROMPTS, COMPLETIONS, None, texts, logps, {}, None, None)
    trainer.use_vllm = sampled is not None
    return trainer._generate_and_score_completions([{"prompt": "w1"}] * len(PROMPTS))


def nudge(model):
    """As an optimizer step would, so that the old policy and the present one differ."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


CASES = [
    *(
        {"loss_type": name, "importance_sampling_level": level}
        for name in LOSS_TYPES
        for level in ("token", "sequence")
    ),
    *({"loss_type": name, "beta": 0.1, "delta": 1.5, "temperature": 0.7} for name in LOSS_TYPES),
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "delta": 1.5},
    {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "scale_rewards": "batch"},
    {"loss_type": "grpo", "mask_truncated_completions": True, "scale_rewards": "none", "reward_weights": (2.0, 0.5)},
    {"loss_type": "cispo", "epsilon_high": 5.0, "multi_objective_aggregation": "normalize_then_sum"},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
VLLM_CASES = [
    {"loss_type": name, "vllm_importance_sampling_mode": mode}
    for name, mode in itertools.product(("dapo", "grpo"), MODES)
]
VLLM_CASES += [
    {"loss_type": name, "vllm_importance_sampling_mode": "token_truncate", "beta": 0.1}
    for name in LOSS_TYPES
    if name not in ("dapo", "grpo")
]
VLLM_CASES += [
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "sequence_mask"},
    {
        "loss_type": "dapo",
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.8,
        "vllm_importance_sampling_clip_max": 1.4,
    },
]


def compare(parts, tmp_path, changes, *, with_vllm, off_policy):
    changes = dict(changes)
    trl_changes = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    if trl_changes.get("beta", 0) == 0:
        trl_changes.setdefault("beta", 0.0)
    settings = kit_settings(changes)
    trainer = make_trainer(parts, tmp_path, trl_changes | ({"num_iterations": 2} if off_policy else {}))
    model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    reference = copy.deepcopy(model)
    with torch.no_grad():
        old = kit_logps(model, settings)
        sampled = sampler_logps(old) if with_vllm else None
    if trainer.ref_model is not None:  # or the KL would be 0 on policy: the base model is another one here
        nudge(reference)
        trainer.ref_model.load_state_dict(reference.state_dict())

    inputs = score_with_trl(trainer, sampled)
    if off_policy:
        if "old_per_token_logps" not in inputs:  # what TRL stores when its steps are not aligned
            inputs["old_per_token_logps"] = pad(old)[0]
        nudge(trainer.model)
        nudge(model)
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()

    scores = torch.tensor([[float("nan") if r is None else r for r in row] for row in REWARDS])
    result = group_advantages(scores, settings, ["first_reward", "second_reward"])
    logps, mask = pad(kit_logps(model, settings))
    is_truncated = truncated(FINISH_REASONS)
    mask = loss_mask(mask, is_truncated, settings)
    totals = StepTotals.from_lengths([len(ids) for ids in COMPLETIONS], is_truncated, settings)
    ratio, metrics = None, {}
    if with_vllm:
        ratio, metrics = sampling_ratio(pad(old)[0], pad(sampled)[0], mask, settings)
    with torch.no_grad():
        ref = pad(kit_logps(reference, settings))[0] if settings.beta else None
    loss, more = policy_loss(
        logps, result.advantages, mask, settings=settings, totals=totals,
        old_logps=pad(old)[0] if off_policy else None, ref_logps=ref, sampling_ratio=ratio,
    )  # fmt: skip
    loss.backward()

    torch.testing.assert_close(result.advantages, inputs["advantages"], **TOLERANCE)
    assert mask.int().tolist() == inputs["completion_mask"].tolist()
    if with_vllm:
        torch.testing.assert_close(ratio, inputs["importance_sampling_ratio"], **TOLERANCE)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    theirs = gradients(trainer.accelerator.unwrap_model(trainer.model))
    assert any(g.abs().max() > 1e-3 for g in theirs.values()), "an all-zero gradient would agree with anything"
    torch.testing.assert_close(gradients(model), theirs, **TOLERANCE)
    reported = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    ours = finalize_metrics(metrics) | finalize_metrics(more) | result.metrics
    common = [name for name in ours if name in reported and name != "frac_reward_zero_std"]
    assert len(common) >= 6
    assert {n: ours[n] for n in common} == pytest.approx({n: reported[n] for n in common}, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("changes", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_loss_and_gradient_off_policy_are_trl_s(parts, tmp_path, changes):
    compare(parts, tmp_path, changes, with_vllm=False, off_policy=True)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_on_policy_are_trl_s(parts, tmp_path, loss_type):
    compare(parts, tmp_path, {"loss_type": loss_type}, with_vllm=False, off_policy=False)


@pytest.mark.parametrize("changes", VLLM_CASES, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("off_policy", [False, True], ids=["on_policy", "off_policy"])
def test_the_correction_for_vllm_s_log_probs_is_trl_s(parts, tmp_path, changes, off_policy):
    compare(parts, tmp_path, changes, with_vllm=True, off_policy=off_policy)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulated_micro_batches_are_trl_s_accumulation(parts, tmp_path, loss_type):
    """Three micro-batches of two rows. TRL averages them, or for dapo and cispo divides by the step's tokens, and the
    kit adds them: the same for all but bnpo, whose mean over micro-batches is not the mean over the step."""
    micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    settings = kit_settings({"loss_type": loss_type})
    trainer = make_trainer(parts, tmp_path, {"loss_type": loss_type, "beta": 0.0} | micro)
    trainer.current_gradient_accumulation_steps = 3
    model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    inputs = score_with_trl(trainer, None)
    nudge(trainer.model)
    with torch.no_grad():
        old, mask = pad(kit_logps(model, settings))
    nudge(model)
    logps, _ = pad(kit_logps(model, settings))
    advantages, totals = inputs["advantages"], StepTotals.of(mask)
    expected, total, local = 0.0, 0.0, 0.0
    for start in range(0, 6, 2):
        rows = slice(start, start + 2)
        part = {k: v[rows] if v.dim() else v for k, v in inputs.items()} | {"old_per_token_logps": old[rows]}
        loss = trainer._compute_loss(trainer.model, part)
        loss.backward()
        expected += loss.detach()
        share = (logps[rows], advantages[rows], mask[rows])
        total += policy_loss(*share, settings=settings, totals=totals, old_logps=old[rows])[0]
        of_part = StepTotals.of(mask[rows])
        local += policy_loss(*share, settings=settings, totals=of_part, old_logps=old[rows])[0].detach() / 3
    total.backward()
    if loss_type == "bnpo":
        assert abs(total - expected) > 1e-3
        torch.testing.assert_close(local, expected, **TOLERANCE)
    else:
        torch.testing.assert_close(total.detach(), expected, **TOLERANCE)
        torch.testing.assert_close(gradients(model), gradients(trainer.model), **TOLERANCE)
