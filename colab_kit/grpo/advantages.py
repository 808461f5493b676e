"""From rewards to advantages: how much better a completion is than its group.

GRPO (https://huggingface.co/papers/2402.03300) takes the group's own mean as the baseline: no value model.
Names and defaults are TRL's (`scale_rewards`, `reward_weights`, `multi_objective_aggregation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..presets import Settings

STD_EPS = 1e-4
"""Added to the standard deviation before dividing, as in TRL."""


@dataclass(frozen=True)
class Advantages:
    """What one generation batch of B completions earned."""

    advantages: torch.Tensor
    """[B] float32; 0 for a completion that nothing scored, and throughout a group whose rewards are all equal"""
    rewards: torch.Tensor
    """[B] float32, weighted sum over the reward functions; NaN where nothing scored"""
    metrics: dict[str, float] = field(default_factory=dict)
    """`reward`, `reward_std`, `frac_reward_zero_std`, and `rewards/{name}/mean` and `/std` when names are given"""


def _nanstd(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """Sample standard deviation (n - 1) of what is not NaN; 0 where fewer than two values are left."""
    count = (~x.isnan()).sum(dim=dim, keepdim=keepdim)
    mean = x.nanmean(dim=dim, keepdim=True)
    squares = ((x - mean) ** 2).nansum(dim=dim, keepdim=keepdim)
    return torch.where(count > 1, squares / (count - 1).clamp(min=1), 0.0).sqrt()


def _equal_up_to_rounding(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Whether the group's `values` [n, G, ...] differ by no more than the float32 rounding of terms of `sizes`.

    Rewards arrive in float32: each term is off by at most half an ulp, so two weighted sums of equal true value
    differ by at most eps times the sum of the terms' sizes. Dividing such a difference by its own standard
    deviation would turn it into an advantage near 1, and rounding into a training signal.
    """
    low = values.nan_to_num(nan=torch.inf, posinf=torch.inf).amin(dim=1, keepdim=True)
    high = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(dim=1, keepdim=True)
    limit = 2 * torch.finfo(torch.float32).eps * sizes.nan_to_num(nan=0.0).amax(dim=1, keepdim=True)
    return high - low <= limit


def group_advantages(
    rewards_per_func: torch.Tensor, settings: Settings, names: Sequence[str] | None = None
) -> Advantages:
    """Advantages of one generation batch.

    Args:
        rewards_per_func: [B, F] float32, one column a reward function, NaN where it returned None (not scored).
            `settings.num_generations` consecutive rows belong to one prompt.
        settings: `scale_rewards`, `reward_weights` and `multi_objective_aggregation` are read.
        names: the F functions' names, for the metrics.

    With `sum_then_normalize`, a completion's reward is r = sum_k w_k r_k over the functions that scored it, and its
    advantage (r - mean of the group) / (std + 1e-4), where the std is the group's (`group`), that of all B rewards
    (`batch`, https://huggingface.co/papers/2508.08221) or absent (`none`, Dr. GRPO,
    https://huggingface.co/papers/2503.20783). With `normalize_then_sum` (GDPO,
    https://huggingface.co/papers/2601.05242) each function is normalized within the group first, then the weighted
    sum is normalized over the batch; as in TRL, `scale_rewards` then plays no part.

    Unlike TRL's, `frac_reward_zero_std` is the share of completions in groups without any difference whatever
    `scale_rewards` is: it answers "how many prompts taught nothing".

    Raises:
        ValueError: rows are not whole groups, a weight is missing, or a reward is infinite.
    """
    if rewards_per_func.dim() != 2:
        raise ValueError(f"rewards_per_func must be [num_completions, num_funcs]; got {tuple(rewards_per_func.shape)}")
    num_rows, num_funcs = rewards_per_func.shape
    group = settings.num_generations
    if num_rows == 0 or num_rows % group:
        raise ValueError(f"{num_rows} completions are not whole groups of num_generations={group}")
    weights = settings.reward_weights or (1.0,) * num_funcs
    if len(weights) != num_funcs:
        raise ValueError(f"reward_weights has {len(weights)} weights for {num_funcs} reward functions")
    if rewards_per_func.isinf().any():
        raise ValueError("a reward is infinite; rewards must be finite numbers, or None for 'not scored'")

    # float64 for B x F numbers costs nothing, and keeps the mean of seven times 0.3 at 0.3.
    scores = rewards_per_func.double()
    weights = torch.tensor(weights, dtype=scores.dtype, device=scores.device)
    unscored = scores.isnan().all(dim=1)

    def summed(columns: torch.Tensor) -> torch.Tensor:
        return (columns * weights).nansum(dim=1).masked_fill(unscored, torch.nan)

    rewards = summed(scores)
    grouped = rewards.view(-1, group)
    sizes = summed(scores.abs() * weights.sign()).abs().view(-1, group)
    flat = _equal_up_to_rounding(grouped, sizes)
    centered = torch.where(flat, grouped * 0, grouped - grouped.nanmean(dim=1, keepdim=True))

    if settings.multi_objective_aggregation == "normalize_then_sum":
        per_func = scores.view(-1, group, num_funcs)
        flat_func = _equal_up_to_rounding(per_func, per_func.abs())
        per_func = torch.where(flat_func, per_func * 0, per_func - per_func.nanmean(dim=1, keepdim=True))
        per_func = per_func / (_nanstd(per_func, dim=1, keepdim=True) + STD_EPS)
        totals = summed(per_func.view(-1, num_funcs))
        advantages = (totals - totals.nanmean()) / (_nanstd(totals) + STD_EPS)
        flat = flat_func.all(dim=2)
    elif settings.scale_rewards == "group":
        advantages = centered / (_nanstd(centered, dim=1, keepdim=True) + STD_EPS)
    elif settings.scale_rewards == "batch":
        advantages = centered / (_nanstd(rewards) + STD_EPS)
    else:
        advantages = centered

    metrics = {
        "reward": rewards.nanmean().item(),
        "reward_std": _nanstd(rewards).item(),
        "frac_reward_zero_std": flat.double().mean().item(),
    }
    for k, name in enumerate(names or ()):
        metrics[f"rewards/{name}/mean"] = scores[:, k].nanmean().item()
        metrics[f"rewards/{name}/std"] = _nanstd(scores[:, k]).item()
    return Advantages(advantages.reshape(-1).nan_to_num(nan=0.0).float(), rewards.float(), metrics)
