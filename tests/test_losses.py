"""What the losses, advantages and masks promise for any batch."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings

from colab_kit.grpo import (
    StepTotals,
    combine_metrics,
    completion_metrics,
    finalize_metrics,
    group_advantages,
    lengths_to_mask,
    loss_mask,
    policy_loss,
    sampling_ratio,
    truncated,
)
from colab_kit.presets import LOSS_TYPES, Settings

quick = hypothesis_settings(max_examples=25, deadline=None, derandomize=True)
loss_types = st.sampled_from(LOSS_TYPES)
levels = st.sampled_from(["token", "sequence"])
seeds = st.integers(0, 2**31)


def random_batch(seed, rows=4, width=5):
    """Log-probs of three policies near each other, advantages of both signs and 0, lengths from 0 to width."""
    rng = torch.Generator().manual_seed(seed)
    logps = -torch.rand(rows, width, generator=rng, dtype=torch.float64) * 3
    near = [logps + 0.4 * torch.randn(rows, width, generator=rng, dtype=torch.float64) for _ in range(3)]
    advantages = torch.randn(rows, generator=rng, dtype=torch.float64)
    advantages[0] = 0.0
    lengths = torch.randint(0, width + 1, (rows,), generator=rng)
    lengths[-1] = width
    return {
        "logps": logps,
        "advantages": advantages,
        "mask": lengths_to_mask(lengths, width),
        "old_logps": near[0],
        "ref_logps": near[1],
        "sampling_ratio": (logps - near[2]).exp(),
    }


def loss_and_gradient(batch, settings, totals):
    logps = batch["logps"].clone().requires_grad_()
    loss, metrics = policy_loss(**{**batch, "logps": logps}, settings=settings, totals=totals)
    loss.backward()
    return loss.detach(), logps.grad, metrics


def rows_of(batch, rows):
    return {name: value[rows] for name, value in batch.items()}


def kit_settings(**changes):
    return Settings(num_generations=4, per_device_train_batch_size=4, max_completion_length=7, **changes)


@quick
@given(seeds, loss_types, levels, st.permutations(range(4)), st.integers(1, 3))
def test_a_step_s_loss_and_gradient_do_not_depend_on_how_it_is_split_or_ordered(seed, loss_type, level, order, cut):
    settings = kit_settings(loss_type=loss_type, importance_sampling_level=level, beta=0.1, delta=2.0)
    batch = random_batch(seed)
    totals = StepTotals.of(batch["mask"])
    whole, gradient, metrics = loss_and_gradient(batch, settings, totals)
    total, parts, seen = 0.0, torch.zeros_like(gradient), []
    for rows in (order[:cut], order[cut:]):
        loss, parts[rows], part = loss_and_gradient(rows_of(batch, rows), settings, totals)
        total += loss
        seen.append(part)
    torch.testing.assert_close(total, whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(parts, gradient, atol=1e-12, rtol=1e-12)
    assert finalize_metrics(combine_metrics(*seen)) == pytest.approx(finalize_metrics(metrics), abs=1e-12)


@quick
@given(seeds, loss_types, levels, st.integers(1, 4), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e4]))
def test_padding_of_any_content_changes_neither_loss_nor_gradient(seed, loss_type, level, extra, junk):
    settings = kit_settings(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    batch = random_batch(seed)
    batch["sampling_ratio"] = batch["sampling_ratio"][:, :1]
    totals = StepTotals.of(batch["mask"])
    whole, gradient, _ = loss_and_gradient(batch, settings, totals)
    padded = dict(batch)
    for name in ("logps", "old_logps", "ref_logps"):
        padded[name] = torch.nn.functional.pad(batch[name].masked_fill(~batch["mask"], junk), (0, extra), value=junk)
    padded["mask"] = torch.nn.functional.pad(batch["mask"], (0, extra))
    loss, wide, _ = loss_and_gradient(padded, settings, totals)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(wide[:, : gradient.shape[1]], gradient)
    assert not wide[:, gradient.shape[1] :].any() and not wide[~padded["mask"]].any()


@quick
@given(
    st.floats(-0.7, 0.7),
    st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3),
    st.sampled_from([None, 0.2, 0.28, 0.5]),
    st.sampled_from([None, 1.8]),
    st.sampled_from(["grpo", "bnpo", "dapo", "dr_grpo", "luspo"]),
)
def test_the_gradient_is_zero_exactly_where_clipping_says(log_ratio, advantage, epsilon_high, delta, loss_type):
    """Zero above 1 + epsilon_high for what was good, below 1 - epsilon for what was bad, and above delta."""
    ratio, high = math.exp(log_ratio), 0.2 if epsilon_high is None else epsilon_high
    assume(min(abs(ratio - bound) for bound in (0.8, 1 + high, delta or 9)) > 1e-6)
    settings = kit_settings(loss_type=loss_type, epsilon=0.2, epsilon_high=epsilon_high, delta=delta)
    logps = torch.tensor([[log_ratio - 1]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(
        logps,
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1, 1),
        settings=settings,
        totals=StepTotals(1, 1),
        old_logps=torch.tensor([[-1.0]], dtype=torch.float64),
    )
    loss.backward()
    clipped = ratio > 1 + high if advantage > 0 else ratio < 0.8 or (delta is not None and ratio > delta)
    assert (logps.grad.item() == 0) == clipped


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_rows_and_empty_batches_contribute_exactly_zero(loss_type, level):
    settings = kit_settings(loss_type=loss_type, importance_sampling_level=level, beta=0.1)
    batch = random_batch(0)
    batch["mask"] = torch.zeros_like(batch["mask"])
    batch["old_logps"] = torch.full_like(batch["old_logps"], -math.inf)
    loss, gradient, metrics = loss_and_gradient(batch, settings, StepTotals.of(batch["mask"]))
    assert loss == 0 and not gradient.any()
    assert all(math.isfinite(value) for value in finalize_metrics(metrics).values())
    empty = {name: value[:, :0] for name, value in batch.items() if value.dim() == 2} | {"advantages": torch.ones(4)}
    loss, _, _ = loss_and_gradient(empty, settings, StepTotals(4, 0))
    assert loss == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_group_without_differences_has_no_gradient_even_at_extreme_ratios(loss_type):
    settings = kit_settings(loss_type=loss_type)
    result = group_advantages(torch.full((4, 1), 0.3), settings)
    assert result.metrics["frac_reward_zero_std"] == 1.0
    logps = torch.zeros(4, 3, requires_grad=True)
    loss, _ = policy_loss(
        logps,
        result.advantages,
        torch.ones(4, 3),
        settings=settings,
        totals=StepTotals(4, 12),
        old_logps=torch.full((4, 3), -1e4),
    )
    loss.backward()
    assert loss == 0 and not logps.grad.any()


def test_truncated_completions_leave_the_loss_and_its_token_count_but_not_the_sequence_count():
    settings = kit_settings(mask_truncated_completions=True)
    is_truncated = truncated(["stop", "length", "length", "stop"])
    mask = loss_mask(lengths_to_mask([2, 3, 3, 1]), is_truncated, settings)
    assert mask.sum(-1).tolist() == [2, 0, 0, 1]
    totals = StepTotals.from_lengths([2, 3, 3, 1], is_truncated, settings)
    assert totals == StepTotals.of(mask) == StepTotals(num_sequences=4, num_tokens=3)
    metrics = completion_metrics([2, 3, 3, 1], is_truncated)
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["completions/mean_terminated_length"] == 1.5
    assert completion_metrics([3, 3], truncated(["length"] * 2))["completions/max_terminated_length"] == 0
    assert loss_mask(mask, is_truncated, kit_settings()).equal(mask)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_the_log_probs():
    batch = random_batch(1)
    inputs = {name: batch[name] for name in ("logps", "advantages", "mask")}
    totals = StepTotals.of(batch["mask"])
    loss, gradient, _ = loss_and_gradient(inputs, kit_settings(), totals)
    expected = -(batch["advantages"][:, None] * batch["mask"]).sum() / totals.num_tokens
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, -batch["advantages"][:, None] * batch["mask"] / totals.num_tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ratios_of_half_precision_log_probs_are_computed_in_float32(dtype):
    """-10 and -9.992 differ by one float16 step; e^0.0078 = 1.00784 would round to 1.0078 there, to 1.0078 or 1 in
    bfloat16."""
    old = torch.tensor([[-10.0]], dtype=dtype)
    logps = torch.tensor([[-9.9921875]], dtype=dtype)
    expected = math.exp(logps.double().item() - old.double().item())
    settings = kit_settings()
    loss, _ = policy_loss(
        logps.requires_grad_(), torch.ones(1, dtype=dtype), torch.ones(1, 1), settings=settings,
        totals=StepTotals(1, 1), old_logps=old,
    )  # fmt: skip
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(-expected, abs=1e-7)
    loss.backward()
    assert logps.grad.dtype == dtype
    ratio, _ = sampling_ratio(logps.detach(), old, torch.ones(1, 1), settings)
    assert ratio.dtype == torch.float32 and ratio.item() == pytest.approx(expected, abs=1e-7)


@quick
@given(
    st.lists(st.integers(-8, 8), min_size=8, max_size=8),
    st.sampled_from([-1000.0, -3.5, 0.25, 64.0, 1000.0]),
    st.sampled_from(["group", "batch", "none"]),
)
def test_adding_a_constant_to_every_reward_of_a_group_changes_no_advantage(rewards, shift, scale_rewards):
    settings = kit_settings(scale_rewards=scale_rewards)
    rewards = torch.tensor(rewards, dtype=torch.float32).unsqueeze(1) / 8  # exact in float32, shifted or not
    plain = group_advantages(rewards, settings).advantages
    shifted = group_advantages(rewards + shift, settings).advantages
    torch.testing.assert_close(plain, shifted)
    torch.testing.assert_close(plain.view(-1, 4).sum(1), torch.zeros(2), atol=1e-5, rtol=0)


def test_rounding_in_a_weighted_sum_is_not_taken_for_a_difference_between_completions():
    """0.1 + 0.2 and 0.3 + 0 are one reward; in float32 they differ in the last place, and near 1000 by more."""
    for size in (1.0, 1000.0):
        scores = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.2, 0.1], [0.0, 0.3]]) * size
        result = group_advantages(scores, kit_settings())
        assert not result.advantages.any() and result.metrics["frac_reward_zero_std"] == 1.0
    small = group_advantages(torch.tensor([[1.0], [1.0], [1.0], [1.001]]), kit_settings())
    assert small.advantages[3] > 1, "a small real difference must stay one"


def test_weights_and_the_order_of_summing_and_normalizing():
    """Worked by hand: both columns are 0, 0, 0, x in one group, whose normalized values are -0.5 x 3 and 1.5."""
    scores = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 100.0]])
    weighted = group_advantages(scores, kit_settings(reward_weights=(2.0, 0.01)), names=["a", "b"])
    assert weighted.rewards.tolist() == pytest.approx([0, 0, 0, 3.0])
    assert weighted.metrics["rewards/b/mean"] == 25.0 and weighted.metrics["reward"] == pytest.approx(0.75)
    assert weighted.metrics["reward_std"] == pytest.approx(1.5)
    settings = kit_settings(multi_objective_aggregation="normalize_then_sum")
    mixed = torch.tensor([[0.0, 100.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    equal = group_advantages(mixed, settings).advantages
    assert equal[0].item() == pytest.approx(equal[3].item(), abs=1e-3), "each function counts the same after all"
    summed = group_advantages(mixed, kit_settings()).advantages
    assert summed[0] > 1 > 0 > summed[3], "summed first, the large one drowns the small one"


def test_nothing_scored_gives_zero_advantages_and_reports_no_reward():
    result = group_advantages(torch.full((8, 2), math.nan), kit_settings())
    assert not result.advantages.any() and math.isnan(result.metrics["reward"])


@pytest.mark.parametrize(
    "rewards, changes, words",
    [
        (torch.zeros(6, 1), {}, "num_generations=4"),
        (torch.zeros(4, 2), {"reward_weights": (1.0,)}, "reward_weights has 1 weights for 2"),
        (torch.tensor([[0.0], [math.inf], [0.0], [0.0]]), {}, "infinite"),
        (torch.zeros(4), {}, "num_funcs"),
    ],
)
def test_rewards_that_make_no_whole_groups_are_refused(rewards, changes, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(rewards, kit_settings(**changes))


def test_beta_without_the_base_model_s_log_probs_is_an_error():
    with pytest.raises(ValueError, match="beta"):
        policy_loss(
            torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), settings=kit_settings(beta=0.1),
            totals=StepTotals(1, 1),
        )  # fmt: skip
