"""The policy loss, with TRL's names and meanings, and one difference: denominators are those of the whole step.

A loss divided by what the micro-batch at hand holds changes with accumulation, order and padding, and nothing in a
log shows it. So every function here takes `StepTotals`, counted once for the optimizer step; the losses of its
micro-batches, however cut, then add up to the step's loss, and their gradients to its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..presets import Settings

MAX_LOG_RATIO = 60.0
"""Ratios end at e^60: float32 turns e^89 into inf, and a masked or zero advantage times inf into NaN."""


@dataclass(frozen=True)
class StepTotals:
    """What one whole optimizer step holds: the denominators of its loss."""

    num_sequences: int
    """completions, truncated ones included even where `mask_truncated_completions` leaves them out of the loss"""
    num_tokens: int
    """completion tokens that the loss counts, so without masked ones"""

    @classmethod
    def of(cls, mask: torch.Tensor) -> StepTotals:
        """From the step's loss mask, [B, T]."""
        return cls(mask.shape[0], int(mask.sum()))

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | torch.Tensor, is_truncated: torch.Tensor, settings: Settings
    ) -> StepTotals:
        """From completion lengths in tokens [B] and the truncated flags [B]."""
        lengths = torch.as_tensor(lengths)
        kept = lengths[~is_truncated.to(lengths.device)] if settings.mask_truncated_completions else lengths
        return cls(len(lengths), int(kept.sum()))


def _full(x: torch.Tensor) -> torch.Tensor:
    """At least float32: in half precision a ratio near 1 comes in steps of 1/1024 (float16) or 1/128 (bfloat16)."""
    return x if x.dtype == torch.float64 else x.float()


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def aggregate(
    per_token_loss: torch.Tensor, mask: torch.Tensor, *, settings: Settings, totals: StepTotals
) -> torch.Tensor:
    """This micro-batch's share of the step's loss, a scalar, from per-token losses [B, T] (or [B, 1]) and mask [B, T].

    grpo, sapo: mean over sequences of the mean over a sequence's tokens. dapo, cispo: sum over the step's tokens /
    their number. dr_grpo: sum / (sequences x max_completion_length). luspo: mean over sequences of the sum.
    bnpo: TRL divides by the *micro-batch's* tokens, which makes the result depend on how the batch was cut; here the
    step's tokens are taken, so it equals dapo. Pass the micro-batch's own totals to get TRL's value.
    """
    mask = mask.bool()
    kept = torch.where(mask, per_token_loss, 0.0)
    sequences, tokens = max(totals.num_sequences, 1), max(totals.num_tokens, 1)
    if settings.loss_type in ("grpo", "sapo"):
        return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    if settings.loss_type in ("dapo", "cispo", "bnpo"):
        return kept.sum() / tokens
    if settings.loss_type == "dr_grpo":
        return kept.sum() / (sequences * settings.max_completion_length)
    return kept.sum() / sequences  # luspo


def policy_loss(
    logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    settings: Settings,
    totals: StepTotals,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    sampling_ratio: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one micro-batch; the losses of a step's micro-batches add up to the step's loss.

    Args:
        logps: [B, T] log-probs of the completion tokens, with gradient; half precision is raised to float32.
        advantages: [B] or [B, 1].
        mask: [B, T], true where a token counts. What other positions hold, NaN included, has no effect.
        totals: of the whole optimizer step.
        old_logps: [B, T] of the policy that sampled, when it isn't the present one (`num_iterations` > 1). None: on
            policy; the ratio is exactly 1 and its gradient that of logps.
        ref_logps: [B, T] of the base model; needed if `beta` isn't 0.
        sampling_ratio: [B, T] or [B, 1] from `sampling_ratio`, multiplied in.
        entropy: [B, T], only reported.

    Clipping, per token (https://huggingface.co/papers/2402.03300) or on the sequence's geometric mean ratio (GSPO,
    https://huggingface.co/papers/2507.18071), is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with r capped
    at `delta` in the first term. cispo (https://huggingface.co/papers/2506.13585): -min(r, epsilon_high) A logp with
    the ratio detached: there, as in TRL, `epsilon_high` caps the ratio itself (the paper's 5, say). sapo
    (https://huggingface.co/papers/2511.20347) replaces the clip by a sigmoid. luspo
    (https://huggingface.co/papers/2602.05261) is meant for `importance_sampling_level="sequence"`.
    beta adds the k3 estimate of KL(policy || base), e^(ref - p) - (ref - p) - 1
    (http://joschu.net/blog/kl-approx.html), times the ratio if `use_bias_correction_kl`.

    Returns:
        (loss, metrics): a scalar; sums for `combine_metrics` and `finalize_metrics`, named as in TRL.
    """
    mask = mask.bool()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    if settings.beta and ref_logps is None:
        raise ValueError(f"beta={settings.beta} needs ref_logps, the base model's log-probs")
    # Masked positions are made harmless before anything is computed: 0 x inf is NaN, in the gradient too.
    advantages = _full(advantages)
    logps = _full(logps).masked_fill(~mask, 0.0)
    old_logps = logps.detach() if old_logps is None else _full(old_logps.detach()).masked_fill(~mask, 0.0)

    log_ratio = logps - old_logps
    if settings.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = _exp(log_ratio)  # [B, T], or [B, 1] by sequence, and so is everything made of it

    metrics: dict[str, torch.Tensor] = {}
    epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    if settings.loss_type == "cispo":
        per_token = -ratio.clamp(max=epsilon_high).detach() * advantages * logps
        metrics["cispo_clip_ratio"] = _sums((ratio > epsilon_high) & (advantages > 0), mask)
    elif settings.loss_type == "sapo":
        positive, negative = settings.sapo_temperature_pos, settings.sapo_temperature_neg
        tau = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
        per_token = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    else:
        clipped = ratio.clamp(1 - settings.epsilon, 1 + epsilon_high)
        capped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
        per_token = -torch.min(capped * advantages, clipped * advantages)
        low = (ratio < 1 - settings.epsilon) & (advantages < 0)
        high = (ratio > 1 + epsilon_high) & (advantages > 0)
        for name, hit in (("low", low), ("high", high), ("region", low | high)):
            metrics[f"clip_ratio/{name}_mean"] = _sums(hit, mask)

    if sampling_ratio is not None:
        per_token = per_token * _full(sampling_ratio.detach())
    if settings.beta:
        difference = _full(ref_logps.detach()).masked_fill(~mask, 0.0) - logps
        kl = _exp(difference) - difference - 1
        if settings.use_bias_correction_kl:
            kl = kl * ratio
        per_token = per_token + settings.beta * kl
        metrics["kl"] = _sums(kl, mask)
    if entropy is not None:
        metrics["entropy"] = _sums(entropy, mask)
    return aggregate(per_token, mask, settings=settings, totals=totals), metrics


def _sums(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[2]: sum and count, over tokens for [B, T] and over sequences for [B, 1], as TRL averages them."""
    x = x.detach().double()
    if x.shape[1] == 1 and mask.shape[1] != 1:
        return torch.stack([x.sum(), x.new_tensor(x.shape[0])])
    return torch.stack([torch.where(mask, x, 0.0).sum(), mask.sum().double()])


def sampling_ratio(
    trainer_logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The correction for vLLM's log-probs differing from the trainer's of the same policy (kernels, dtype).

    Args:
        trainer_logps: [B, T] at the time of sampling; on policy the present ones, detached.
        sampler_logps: [B, T] from vLLM; NaN where it reported none, which gives no correction there.
        mask: [B, T].

    `vllm_importance_sampling_mode`: the ratio e^(trainer - sampler) of each token, or of the whole sequence (the sum
    over its tokens); beyond `vllm_importance_sampling_clip_min` / `_max` it is cut to the bound (`truncate`,
    https://fengyao.notion.site/off-policy-rl) or the token or sequence gets weight 0 (`mask`).

    Returns:
        (ratio, metrics): [B, T] or [B, 1], float32, detached; TRL's `sampling/...` metrics, to be combined. A
        micro-batch is enough to compute its own ratios. `sampling_logp_gap` is the signed mean of
        sampler - trainer, for `kept_support_warning`.
    """
    mask = mask.bool()
    known = mask & ~sampler_logps.isnan()
    difference = torch.where(known, _full(trainer_logps.detach()) - _full(sampler_logps.detach()), 0.0)
    by_sequence = settings.vllm_importance_sampling_mode.startswith("sequence")
    ratio = _exp(difference.sum(-1, keepdim=True) if by_sequence else difference)
    low, high = settings.vllm_importance_sampling_clip_min, settings.vllm_importance_sampling_clip_max
    if settings.vllm_importance_sampling_mode.endswith("truncate"):
        if low is not None or high is not None:
            ratio = ratio.clamp(min=low, max=high)
    else:
        beyond = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
        ratio = ratio.masked_fill(beyond, 0.0)

    counted = torch.ones_like(ratio, dtype=torch.bool) if by_sequence else mask
    metrics = {"sampling/sampling_logp_difference/mean": _sums(difference.abs(), known)}
    metrics["sampling/importance_sampling_ratio/mean"] = _sums(ratio, counted)
    metrics["sampling_logp_gap"] = _sums(-difference, known)
    if mask.numel():
        metrics["sampling/sampling_logp_difference/max"] = difference.abs().max()
        metrics["sampling/importance_sampling_ratio/min"] = ratio.masked_fill(~counted, math.inf).min()
        metrics["sampling/importance_sampling_ratio/max"] = ratio.masked_fill(~counted, -math.inf).max()
    return ratio, metrics


def combine_metrics(*parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The metrics of several micro-batches as if they had been one: sums and counts add, min and max are taken."""
    combined: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            join = torch.minimum if name.endswith("/min") else torch.maximum if name.endswith("/max") else torch.add
            combined[name] = join(combined[name], value) if name in combined else value
    return combined


def finalize_metrics(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Sums to means; 0 where nothing was counted, as in TRL. The one place that waits for the GPU."""
    means = {}
    for name, value in sums.items():
        if value.dim():
            total, count = value.tolist()
            means[name] = total / max(count, 1.0)
        else:
            means[name] = 0.0 if math.isinf(value.item()) else value.item()
    return means


def kept_support_warning(settings: Settings, sampling_logp_gap: float) -> str | None:
    """What the trainer says, once, when sampling settings change the distribution that it scores; else None.

    Args:
        sampling_logp_gap: the measured mean over tokens of sampler log-prob - trainer log-prob, in nats. With top-p,
            top-k or min-p, vLLM renormalizes over the kept words, so this is the mean of -log(kept probability
            mass): the bias of every ratio, in the log and a token.
    """
    off = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    changed = [name for name, value in off.items() if getattr(settings, name) not in (value, value or 0)]
    if not changed:
        return None
    said = ", ".join(f"{name}={getattr(settings, name)}" for name in changed)
    reset = ", ".join(f"{name}={off[name]}" for name in changed)
    return (
        f"{said}: vLLM samples from a cut distribution, while the trainer scores the whole one. Measured bias: the "
        f"sampler's log-probs are {sampling_logp_gap:+.4f} nats a token above the trainer's on average (it keeps about "
        f"{math.exp(-sampling_logp_gap):.1%} of the probability mass), so the importance ratio of 100 tokens is off by "
        f"a factor of {math.exp(-100 * sampling_logp_gap):.3g}. {reset} samples from what is trained."
    )
