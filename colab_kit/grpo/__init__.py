"""GRPO's arithmetic, without models or engines: advantages, masks, log-probabilities, losses."""

from .advantages import Advantages, group_advantages
from .logprobs import chunked_logprobs, completion_targets
from .losses import (
    StepTotals,
    aggregate,
    combine_metrics,
    finalize_metrics,
    kept_support_warning,
    policy_loss,
    sampling_ratio,
)
from .masks import completion_mask, completion_metrics, lengths_to_mask, loss_mask, pad, truncated

__all__ = [
    "Advantages",
    "StepTotals",
    "aggregate",
    "chunked_logprobs",
    "combine_metrics",
    "completion_mask",
    "completion_metrics",
    "completion_targets",
    "finalize_metrics",
    "group_advantages",
    "kept_support_warning",
    "lengths_to_mask",
    "loss_mask",
    "pad",
    "policy_loss",
    "sampling_ratio",
    "truncated",
]
