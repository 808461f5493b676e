"""GRPO's arithmetic against figures derived by hand (tests/data/grpo_oracles.json), not by this code."""

import json
import math
from pathlib import Path

import pytest
import torch

from colab_kit.grpo import (
    StepTotals,
    aggregate,
    chunked_logprobs,
    completion_mask,
    completion_targets,
    group_advantages,
    policy_loss,
)
from colab_kit.presets import Settings

ORACLES = json.loads((Path(__file__).parent / "data" / "grpo_oracles.json").read_text())
TOLERANCE = 1e-5


def settings_for(num_generations, **changes):
    return Settings(num_generations=num_generations, per_device_train_batch_size=num_generations, **changes)


def close(actual, expected):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize("case", ORACLES["advantages"], ids=lambda c: f"{c['rewards']}-{c['scale_rewards']}")
def test_advantages_are_those_derived_by_hand(case):
    rewards = torch.tensor(case["rewards"], dtype=torch.float32)
    if "error" in case:
        with pytest.raises(ValueError) as error:
            settings_for(rewards.shape[1])
        assert str(error.value).startswith(case["error"])
        return
    settings = settings_for(rewards.shape[1], scale_rewards=case["scale_rewards"])
    advantages = group_advantages(rewards.reshape(-1, 1), settings).advantages
    assert advantages.dtype == torch.float32
    if "expect" in case:
        close(advantages.view_as(rewards), case["expect"])
    else:
        assert advantages.abs().max() < case["expect_abs_below"]


@pytest.mark.parametrize("case", ORACLES["reward_functions"])
def test_a_completion_that_a_function_did_not_score_is_left_out_of_mean_and_deviation(case):
    scores = torch.tensor([[math.nan if r is None else r for r in row] for row in case["per_function"]]).T
    result = group_advantages(scores, settings_for(len(scores)))
    close(result.advantages, case["expect"])
    for reward, expected in zip(result.rewards.tolist(), case["summed"], strict=True):
        assert math.isnan(reward) if expected is None else reward == pytest.approx(expected)


def aggregation_settings(name):
    loss_type, _, length = name.partition("_max_length_")
    return settings_for(2, loss_type=loss_type, max_completion_length=int(length or 3))


@pytest.mark.parametrize("name", ORACLES["aggregation"]["expect"])
def test_each_loss_type_divides_by_its_own_denominator(name):
    case = ORACLES["aggregation"]
    losses, mask = torch.tensor(case["per_token_loss"], dtype=torch.float32), torch.tensor(case["mask"])
    total = aggregate(losses, mask, settings=aggregation_settings(name), totals=StepTotals.of(mask))
    close(total, case["expect"][name])


@pytest.mark.parametrize("name", ORACLES["aggregation"]["split_into_two_micro_batches_of_one_row"])
def test_two_micro_batches_of_one_row_add_up_to_the_same_loss(name):
    case = ORACLES["aggregation"]
    losses, mask = torch.tensor(case["per_token_loss"], dtype=torch.float32), torch.tensor(case["mask"])
    parts = [
        aggregate(losses[i : i + 1], mask[i : i + 1], settings=aggregation_settings(name), totals=StepTotals.of(mask))
        for i in range(2)
    ]
    close(sum(parts), case["split_into_two_micro_batches_of_one_row"][name])


def test_bnpo_with_each_micro_batch_s_own_totals_is_the_original_definition():
    """bnpo's denominator is the local batch's: two micro-batches of one row average to 3.0, one of both gives 2.5.

    The kit counts the step's tokens instead, so that the figure does not depend on the split."""
    case = ORACLES["aggregation"]
    losses, mask = torch.tensor(case["per_token_loss"], dtype=torch.float32), torch.tensor(case["mask"])
    settings = aggregation_settings("bnpo")
    rows = [(losses[i : i + 1], mask[i : i + 1]) for i in range(2)]
    local = [aggregate(x, m, settings=settings, totals=StepTotals.of(m)) for x, m in rows]
    close(sum(local) / 2, 3.0)
    whole = [aggregate(x, m, settings=settings, totals=StepTotals.of(mask)) for x, m in rows]
    close(sum(whole), case["expect"]["bnpo"])


@pytest.mark.parametrize("case", ORACLES["clipping"], ids=lambda c: f"r{c['ratio']}-A{c['advantage']}")
def test_clipping_gives_the_loss_and_stops_the_gradient_where_it_should(case):
    settings = settings_for(2, epsilon=case["epsilon"], epsilon_high=case.get("epsilon_high"))
    logps = torch.tensor([[math.log(case["ratio"]) - 1.0]], requires_grad=True)
    loss, _ = policy_loss(
        logps,
        torch.tensor([float(case["advantage"])]),
        torch.ones(1, 1),
        settings=settings,
        totals=StepTotals(1, 1),
        old_logps=torch.tensor([[-1.0]]),
    )
    loss.backward()
    close(loss, case["loss"])
    assert (logps.grad.item() == 0) == (case["gradient"] == "zero")


def test_the_kl_term_is_k3_with_the_right_sign_and_derivative():
    case = ORACLES["kl_k3"]
    # advantage 0 and beta 1 leave the KL term alone; the ratio's correction has its own gradient, so it is off here
    settings = settings_for(2, beta=1.0, use_bias_correction_kl=False)
    logps = torch.tensor([[case["logp"]]], requires_grad=True)
    loss, metrics = policy_loss(
        logps,
        torch.zeros(1),
        torch.ones(1, 1),
        settings=settings,
        totals=StepTotals(1, 1),
        ref_logps=torch.tensor([[case["ref_logp"]]]),
    )
    loss.backward()
    close(loss, case["expect"])
    close(logps.grad, [[case["d_expect_d_logp"]]])
    close(metrics["kl"], [case["expect"], 1.0])


@pytest.mark.parametrize("temperature", ORACLES["temperature"]["logp"])
def test_log_probs_are_taken_at_the_sampling_temperature(temperature):
    case = ORACLES["temperature"]
    weight = torch.tensor(case["logits"], dtype=torch.float32).unsqueeze(1)  # with a state of [1], these are the logits
    logps, _ = chunked_logprobs(torch.ones(1, 1), weight, torch.tensor([case["token"]]), temperature=float(temperature))
    close(logps, [case["logp"][temperature]])


def test_the_prompt_s_last_token_predicts_the_completion_s_first():
    """A bigram model as a table: the state after a token is one-hot, the head is the table."""
    case = ORACLES["shift"]
    table = torch.tensor(case["logits_after_token"], dtype=torch.float32)
    sequence = torch.tensor(case["sequence"])
    states = torch.eye(len(table))[sequence]
    hidden, targets = completion_targets(states, sequence, case["prompt_length"])
    logps, _ = chunked_logprobs(hidden, table.T, targets, chunk_size=1)
    close(logps, case["expect_completion_logps"])


@pytest.mark.parametrize("case", ORACLES["completion_mask"], ids=lambda c: str(c["completion"]))
def test_a_completion_counts_up_to_and_including_its_first_end_token(case):
    mask, is_truncated = completion_mask(torch.tensor([case["completion"]]), case["eos"])
    assert mask.int().tolist() == [case["mask"]]
    assert is_truncated.tolist() == [case["truncated"]]
