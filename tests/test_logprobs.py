"""Chunked log-probs: exact in value and gradient, and one chunk of memory."""

import pytest
import torch

from colab_kit.grpo import chunked_logprobs, completion_targets


def problem(n=7, h=5, v=11, dtype=torch.float64, bias=True, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=rng, dtype=torch.float64).to(dtype)
    weight = torch.randn(v, h, generator=rng, dtype=torch.float64).to(dtype)
    extra = torch.randn(v, generator=rng, dtype=torch.float64).to(dtype) if bias else None
    return hidden, weight, torch.randint(0, v, (n,), generator=rng), extra


def reference(hidden, weight, targets, bias, temperature):
    """The whole logits at once, by torch's own log_softmax and autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logps = logits.log_softmax(-1)
    return logps.gather(1, targets[:, None]).squeeze(1), -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_gradcheck_of_states_head_and_bias(chunk_size):
    hidden, weight, targets, bias = problem()

    def function(hidden, weight, bias):
        return chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk_size=chunk_size, bias=bias)[0]

    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_entropy_and_gradient_are_those_of_the_whole_logits(bias, temperature):
    hidden, weight, targets, extra = problem(bias=bias)
    upstream = torch.linspace(-2, 3, len(targets), dtype=torch.float64)  # a gradient that isn't all ones
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    logps, entropy = chunked_logprobs(mine, weight, targets, temperature=temperature, chunk_size=2, bias=extra)
    expected, expected_entropy = reference(theirs, weight, targets, extra, temperature)
    logps.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(logps, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert not entropy.requires_grad


def test_only_what_requires_a_gradient_gets_one():
    hidden, weight, targets, bias = problem(dtype=torch.float32)
    weight.requires_grad_()
    chunked_logprobs(hidden, weight, targets, bias=bias, chunk_size=2)[0].sum().backward()
    assert weight.grad is not None and hidden.grad is None and bias.grad is None
    logps, _ = chunked_logprobs(hidden, weight.detach(), targets)
    assert not logps.requires_grad


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_states_give_float32_log_probs_and_a_gradient_in_their_own_dtype(dtype, tolerance):
    hidden, weight, targets, _ = problem(dtype=dtype, bias=False)
    hidden.requires_grad_()
    logps, entropy = chunked_logprobs(hidden, weight, targets, chunk_size=3)
    expected, _ = reference(hidden.detach().double(), weight.double(), targets, None, 1.0)
    assert logps.dtype == entropy.dtype == torch.float32 and logps.requires_grad
    torch.testing.assert_close(logps.detach().double(), expected, atol=tolerance * 4, rtol=tolerance)
    logps.sum().backward()
    assert hidden.grad.dtype == dtype


def test_a_tiny_incoming_gradient_is_not_lost_in_float16():
    """A mean over many tokens hands down 1e-6; times a word's probability of 1/256 it is below float16's least number.

    Without those words' share the gradient would be off by the mean of the head's rows, 100, here three times the
    gradient itself."""
    rng = torch.Generator().manual_seed(0)
    weight = (100 + 30 * torch.randn(256, 4, generator=rng)).half()
    hidden = torch.full((3, 4), 1e-5, dtype=torch.float16, requires_grad=True)
    targets, upstream = torch.tensor([0, 1, 2]), torch.full((3,), 1e-6)
    chunked_logprobs(hidden, weight, targets)[0].backward(upstream)
    exact = hidden.detach().double().requires_grad_()
    reference(exact, weight.double(), targets, None, 1.0)[0].backward(upstream.double())
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=0.02, atol=2e-7)


def peak_bytes(function):
    """The most bytes that were allocated at one time while `function` ran, from torch's own allocation records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    records = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for record in sorted(records, key=lambda record: record.start_ns()):
        live += record.nbytes()
        peak = max(peak, live)
    return peak


def test_memory_is_one_chunk_s_however_many_chunks_there_are():
    """Forward and backward, in bytes: from 2 to 16 chunks only what is linear in N without V may grow, [N] log-probs
    and their kind and the [N, H] gradient; the whole logits grow eightfold."""
    v, h, chunk = 4096, 4, 16

    def run(chunks, function):
        hidden, weight, targets, _ = problem(n=chunk * chunks, h=h, v=v, dtype=torch.float32, bias=False)
        hidden.requires_grad_()
        return peak_bytes(lambda: function(hidden, weight, targets).sum().backward())

    def chunked(hidden, weight, targets):
        return chunked_logprobs(hidden, weight, targets, chunk_size=chunk)[0]

    one_chunk, few, many = chunk * v * 4, run(2, chunked), run(16, chunked)
    assert few < 4 * one_chunk
    assert many - few <= 14 * chunk * 4 * (h + 8)
    assert run(16, lambda *args: reference(*args, None, 1.0)[0]) > 16 * one_chunk


def test_nothing_as_large_as_the_logits_is_kept_for_the_backward_pass():
    hidden, weight, targets, _ = problem(n=32, h=4, v=512, dtype=torch.float32, bias=False)
    logps, _ = chunked_logprobs(hidden.requires_grad_(), weight, targets, chunk_size=8)
    kept = {tensor.data_ptr(): tensor.numel() for tensor in logps.grad_fn.saved_tensors if tensor is not None}
    assert kept.keys() >= {hidden.data_ptr(), weight.data_ptr()}
    assert sum(kept.values()) <= hidden.numel() + weight.numel() + 2 * len(targets)


def test_autocast_around_the_forward_pass_changes_nothing():
    hidden, weight, targets, _ = problem(dtype=torch.float32, bias=False)
    plain, cast = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected, _ = chunked_logprobs(plain, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = chunked_logprobs(cast, weight, targets)
    expected.sum().backward()
    logps.sum().backward()
    assert torch.equal(logps, expected) and torch.equal(cast.grad, plain.grad)


def test_no_tokens_at_all_give_no_log_probs_and_a_zero_gradient():
    hidden, weight, targets, _ = problem()
    hidden = hidden[:0].requires_grad_()
    logps, entropy = chunked_logprobs(hidden, weight, targets[:0])
    logps.sum().backward()
    assert logps.shape == entropy.shape == (0,) and hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("changes, words", [({"temperature": 0}, "temperature"), ({"chunk_size": 0}, "chunk_size")])
def test_settings_out_of_range_are_refused_by_name(changes, words):
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match=words):
        chunked_logprobs(hidden, weight, targets, **changes)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, targets, _ = problem()
    with pytest.raises(ValueError, match="targets"):
        chunked_logprobs(hidden, weight, targets[1:])
    with pytest.raises(ValueError, match="prompt_length"):
        completion_targets(hidden, targets, 0)
