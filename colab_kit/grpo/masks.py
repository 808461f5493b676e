"""Which tokens count, from lengths and finish reasons only.

Comparing ids with the pad id would drop the end-of-sequence token of every model whose pad token is its EOS, and
with it the only place where a policy learns to stop. So nothing here ever looks for a pad id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..presets import Settings


def lengths_to_mask(lengths: Sequence[int] | torch.Tensor, width: int | None = None, side: str = "right"):
    """[B] lengths in tokens to a bool mask [B, width]; the padding is on `side`. `width` defaults to the longest."""
    lengths = torch.as_tensor(lengths, dtype=torch.long)
    longest = int(lengths.max()) if lengths.numel() else 0
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a sample of {longest} tokens does not fit in a width of {width}")
    positions = torch.arange(width, device=lengths.device)
    if side == "left":
        return positions >= (width - lengths).unsqueeze(1)
    return positions < lengths.unsqueeze(1)


def pad(
    samples: Sequence[torch.Tensor], value: float = 0, side: str = "right", width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-sample 1-D tensors (ids, log-probs) to one [B, T] tensor of their dtype, and the bool mask [B, T].

    `value` may be anything, a real token's id included: the mask comes from the lengths. Empty samples are allowed.
    """
    if not samples:
        raise ValueError("nothing to pad: the list of samples is empty")
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} is not one of left, right")
    mask = lengths_to_mask([len(sample) for sample in samples], width, side).to(samples[0].device)
    padded = samples[0].new_full(mask.shape, value)
    padded[mask] = torch.cat([sample.reshape(-1) for sample in samples])
    return padded, mask


def truncated(finish_reasons: Sequence[str | None]) -> torch.Tensor:
    """[B] bool, from vLLM's `finish_reason`: all but "stop" is a completion that did not end by itself.

    "length" is the usual other one; "abort" and "error" are cut short too.

    Raises:
        ValueError: a reason is None: that request had not finished.
    """
    if None in finish_reasons:
        raise ValueError(f"completion {list(finish_reasons).index(None)} has no finish_reason: it was still running")
    return torch.tensor([reason != "stop" for reason in finish_reasons], dtype=torch.bool)


def completion_mask(completions: torch.Tensor, eos_token_ids: int | Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """For completions that came without lengths and finish reasons, such as those of `model.generate`.

    Args:
        completions: [B, T] long, completion tokens only: an EOS inside the prompt must not end the completion.
        eos_token_ids: one id or several; Llama-3.1 ends a turn with any of three.

    Returns:
        (mask, truncated): [B, T] bool, true up to and including the first EOS; [B] bool, true without an EOS.
    """
    eos = torch.as_tensor(eos_token_ids, device=completions.device).reshape(-1)
    is_eos = torch.isin(completions, eos)
    ended_before = is_eos.cumsum(dim=1) - is_eos.long()
    return ended_before == 0, ~is_eos.any(dim=1)


def loss_mask(mask: torch.Tensor, is_truncated: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The mask [B, T] that the loss takes: without truncated completions if `mask_truncated_completions`
    (overlong filtering of DAPO, https://huggingface.co/papers/2503.14476)."""
    if not settings.mask_truncated_completions:
        return mask.bool()
    return mask.bool() & ~is_truncated.to(mask.device).unsqueeze(1)


def completion_metrics(lengths: Sequence[int] | torch.Tensor, is_truncated: torch.Tensor) -> dict[str, float]:
    """TRL's `completions/...` metrics of a whole step: lengths in tokens, and the truncated share (`clipped_ratio`)."""
    lengths = torch.as_tensor(lengths, dtype=torch.float64)
    # As TRL does: with nothing terminated, the three terminated lengths are 0.
    terminated = lengths[~is_truncated.cpu()] if not is_truncated.all() else lengths.new_zeros(1)
    metrics = {"completions/clipped_ratio": is_truncated.double().mean().item()}
    for name, values in (("", lengths), ("_terminated", terminated)):
        for kind in ("mean", "min", "max"):
            metrics[f"completions/{kind}{name}_length"] = getattr(values, kind)().item()
    return metrics
