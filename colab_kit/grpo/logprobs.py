"""Log-probabilities from hidden states, one chunk of tokens at a time.

The logits of a sequence are its largest tensor by far: 16,384 tokens x 128,256 words x 4 bytes are 7.8 GiB, and
autograd would keep several of that size. Here one chunk's logits exist at a time, in the forward pass and, recomputed,
in the backward pass.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


def completion_targets(
    hidden: torch.Tensor, input_ids: torch.Tensor, prompt_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one sequence that predict its completion, and what they predict.

    The state at position t predicts token t + 1: the prompt's last token predicts the completion's first.

    Args:
        hidden: [L, H], the last hidden states of prompt and completion, without padding.
        input_ids: [L] long.
        prompt_length: tokens, at least 1.

    Returns:
        ([C, H], [C]) with C = L - prompt_length.
    """
    if prompt_length < 1:
        raise ValueError("prompt_length must be at least 1: nothing predicts the first token of a sequence")
    return hidden[prompt_length - 1 : -1], input_ids[prompt_length:]


def _scaled_logits(hidden, weight, bias, temperature):
    """One chunk's logits [C, V], divided by the temperature, in float32 (float64 stays).

    The product itself is taken in the weight's dtype: vLLM computes its logits so, and the ratio between the two needs
    the same arithmetic; besides, a float32 copy of a 128,256 x 4,096 head would take 2 GiB. The softmax's sums, where
    half precision would really lose, are in float32.
    """
    # Autocast is on in a forward pass and off in its backward pass; the recomputed logits must be the same ones.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    return (logits if logits.dtype == torch.float64 else logits.float()).div_(temperature)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size):
        precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
        logps = torch.empty(targets.shape, dtype=precise, device=hidden.device)
        entropy, log_z = torch.empty_like(logps), torch.empty_like(logps)
        for start in range(0, len(targets), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _scaled_logits(hidden[rows], weight, bias, temperature)
            log_z[rows] = logits.logsumexp(dim=-1)
            logps[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_z[rows]
            probs = (logits - log_z[rows, None]).exp_()
            entropy[rows] = log_z[rows] - probs.mul_(logits).sum(dim=-1)
            del logits, probs  # before the next chunk's are made, not after
        ctx.save_for_backward(hidden, weight, bias, targets, log_z)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, _grad_entropy):
        hidden, weight, bias, targets, log_z = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=log_z.dtype) if need_bias else None
        for start in range(0, len(targets), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            # d logp / d logits = (onehot(target) - softmax) / temperature
            slope = _scaled_logits(hidden[rows], weight, bias, ctx.temperature)
            slope.sub_(log_z[rows, None]).exp_().neg_()
            slope.scatter_add_(1, targets[rows, None], torch.ones_like(log_z[rows, None]))
            upstream = (grad_logps[rows, None] / ctx.temperature).to(slope.dtype)
            if need_hidden:
                # The incoming gradient comes after the product: it is often 1e-6 (a mean over tokens), and would
                # push the small entries of the slope below what float16 can hold.
                product = slope.to(weight.dtype) @ weight
                grad_hidden[rows] = (product.to(slope.dtype) * upstream).to(hidden.dtype)
            if need_weight or need_bias:
                slope.mul_(upstream)
                if need_weight:
                    grad_weight.addmm_(slope.t(), hidden[rows].to(slope.dtype))
                if need_bias:
                    grad_bias.add_(slope.sum(dim=0))
            del slope
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ weight.T / temperature)[targets], and the entropy of that distribution.

    Args:
        hidden: [N, H] states that predict `targets` (see `completion_targets` for the shift by one).
        weight: [V, H], the head; `bias`: [V] or None. Gradients reach them only if they require them.
        targets: [N] long.
        temperature: that of sampling, so that these are log-probs of the policy which sampled.
        chunk_size: tokens whose logits exist at one time.

    Returns:
        (logps, entropy): [N] each, nats, float32 (float64 for float64 inputs). The entropy carries no gradient.

    Raises:
        ValueError: shapes that don't fit, temperature <= 0 or chunk_size < 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        raise ValueError(f"expected hidden [N, H], weight [V, H] and targets [N]; got {shapes}")
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, float(temperature), int(chunk_size))
