"""Masks come from lengths and finish reasons; the correction for vLLM's log-probs."""

import math

import pytest
import torch

from colab_kit.grpo import (
    combine_metrics,
    completion_mask,
    finalize_metrics,
    kept_support_warning,
    lengths_to_mask,
    pad,
    sampling_ratio,
    truncated,
)
from colab_kit.presets import Settings


def kit_settings(**changes):
    return Settings(num_generations=4, per_device_train_batch_size=4, **changes)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_end_token_that_is_also_the_pad_token_still_counts(side):
    end = 2
    samples = [torch.tensor([5, end]), torch.tensor([end]), torch.tensor([], dtype=torch.long), torch.tensor([5, 6, 7])]
    ids, mask = pad(samples, value=end, side=side)
    assert mask.sum(-1).tolist() == [2, 1, 0, 3]
    for sample, row, kept in zip(samples, ids, mask, strict=True):
        assert row[kept].tolist() == sample.tolist() and (row[~kept] == end).all()


def test_padding_keeps_the_samples_dtype_and_respects_a_given_width():
    logps, mask = pad([torch.tensor([-1.0, -2.0])], width=4)
    assert logps.tolist() == [[-1.0, -2.0, 0.0, 0.0]] and mask.dtype == torch.bool
    assert lengths_to_mask([0, 2], width=2).tolist() == [[False, False], [True, True]]
    with pytest.raises(ValueError, match="does not fit"):
        lengths_to_mask([3], width=2)
    with pytest.raises(ValueError, match="empty"):
        pad([])


def test_only_a_stop_is_a_completion_that_ended_by_itself():
    assert truncated(["stop", "length", "abort"]).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="completion 1"):
        truncated(["stop", None])


def test_any_of_several_end_tokens_ends_a_completion():
    completions = torch.tensor([[5, 8, 9, 2], [9, 9, 9, 9], [5, 5, 5, 5]])
    mask, is_truncated = completion_mask(completions, [2, 8, 9])
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert is_truncated.tolist() == [False, False, True]


LOG2, LOG4 = math.log(2), math.log(4)
RATIOS = {  # by hand, for two tokens of ratio 2 and 4, then 1/2 and one masked; clip_min 0.75, clip_max 3
    "token_truncate": [[2.0, 3.0], [0.75, 1.0]],
    "token_mask": [[2.0, 0.0], [0.0, 1.0]],
    "sequence_truncate": [[3.0], [0.75]],
    "sequence_mask": [[0.0], [0.0]],
}


@pytest.mark.parametrize("mode", RATIOS)
def test_importance_ratios_are_cut_or_masked_by_token_or_sequence(mode):
    settings = kit_settings(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=0.75)
    trainer = torch.tensor([[LOG2, LOG4], [-LOG2, 50.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0]])
    ratio, metrics = sampling_ratio(trainer, torch.zeros(2, 2), mask, settings)
    torch.testing.assert_close(ratio, torch.tensor(RATIOS[mode]))
    assert not ratio.requires_grad
    final = finalize_metrics(metrics)
    counted = [r for row in RATIOS[mode] for r in row]
    if mode.startswith("token"):
        counted.pop()  # the masked one
    for kind, expected in (("min", min(counted)), ("mean", sum(counted) / len(counted)), ("max", max(counted))):
        assert final[f"sampling/importance_sampling_ratio/{kind}"] == pytest.approx(expected)
    assert final["sampling/sampling_logp_difference/mean"] == pytest.approx(4 * LOG2 / 3)
    assert final["sampling/sampling_logp_difference/max"] == pytest.approx(LOG4)
    parts = [sampling_ratio(trainer[i : i + 1], torch.zeros(1, 2), mask[i : i + 1], settings)[1] for i in range(2)]
    assert finalize_metrics(combine_metrics(*parts)) == pytest.approx(final)


def test_a_token_that_vllm_gave_no_log_prob_for_is_not_corrected():
    settings = kit_settings(vllm_importance_sampling_mode="token_truncate")
    ratio, metrics = sampling_ratio(
        torch.tensor([[-1.0, -1.0]]), torch.tensor([[math.nan, -2.0]]), torch.ones(1, 2), settings
    )
    torch.testing.assert_close(ratio, torch.tensor([[1.0, math.e]]))
    assert finalize_metrics(metrics)["sampling/sampling_logp_difference/mean"] == pytest.approx(1.0)


def test_an_empty_micro_batch_of_ratios_is_finite():
    nothing = torch.zeros(2, 0)
    ratio, metrics = sampling_ratio(nothing, nothing, nothing, kit_settings())
    assert ratio.tolist() == [[1.0], [1.0]] and all(map(math.isfinite, finalize_metrics(metrics).values()))
    masked = sampling_ratio(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), kit_settings())[1]
    assert all(map(math.isfinite, finalize_metrics(masked).values()))


def test_cutting_the_sampling_distribution_is_said_with_the_measured_bias():
    """Sampling from the best 2 of 4 words: kept mass 0.9, so the gap is -log 0.9, computed here from the words."""
    probs = torch.tensor([0.6, 0.3, 0.07, 0.03]).repeat(2, 1)
    trainer = probs.log()[:, :2]
    sampler = (probs[:, :2] / probs[:, :2].sum(1, keepdim=True)).log()
    settings = kit_settings(top_p=0.9, repetition_penalty=1.1)
    gap = finalize_metrics(sampling_ratio(trainer, sampler, torch.ones(2, 2), settings)[1])["sampling_logp_gap"]
    said = kept_support_warning(settings, gap)
    assert gap == pytest.approx(-math.log(0.9), abs=1e-6)
    assert "top_p=0.9" in said and "repetition_penalty=1.1" in said and "90.0%" in said and "+0.1054" in said
    assert kept_support_warning(kit_settings(min_p=0.0), 0.0) is None
    assert "min_p=0.1" in kept_support_warning(kit_settings(min_p=0.1), 0.01)
