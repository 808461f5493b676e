"""Fitting long sequences in one pass: packing, checkpoints in host memory, the MLP in tiles.

What a training pass keeps alive decides how long a sequence can be. Here it keeps one hidden state a layer, in pinned
host memory when the card is short, copied on a stream of its own while the layer computes and fetched one layer ahead
in the backward pass. A layer's backward recomputes its attention, then takes the MLP tile by tile, forward and
backward at once: the MLP is the layer's last operation, so its output is never needed again, and tiling costs no
second recomputation. Values and gradients are those of the plain pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from .policy import Policy
    from .presets import Settings

ATTENTION = "colab_kit_packed"


@dataclasses.dataclass(frozen=True)
class Devices:
    """Which memory devices a pass uses."""

    gradient_checkpointing: bool = False
    activation_offloading: bool = False
    mlp_tile_tokens: int | None = None
    expand_kv: bool = False
    """repeat the key and value heads: torch's memory-efficient kernel, the best before sm_80, has no GQA"""


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped so that no group holds more than `max_tokens` tokens (a longer sequence is alone).

    The longest come first: if memory runs out, it does so in the first micro-batch of the first step.
    """
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[i] > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(i)
        room -= lengths[i]
    return groups


def choose_devices(policy: Policy, settings: Settings):
    """(tokens a micro-batch, memory devices, host store) for this run's training passes; prints what and why."""
    device = policy.device
    tokens = settings.max_tokens_per_micro_batch or max(2048, settings.max_model_length)
    set_by = "as set" if settings.max_tokens_per_micro_batch else "one sequence of full length, or 2,048"
    said = f"Training pass: micro-batches of at most {tokens:,} tokens ({set_by})"
    if device.type == "cpu":
        print(f"{said}; activations are kept (system memory, no recomputation).")
        return tokens, Devices(), None
    layers = policy.model.get_base_model().config.num_hidden_layers
    expand = settings.sdpa_backend == "efficient" or torch.cuda.get_device_capability(device) < (8, 0)
    if policy.host_store is None:
        policy.host_store = HostStore(device, layers, int(host_available() * 0.6))
    print(
        f"{said}; one hidden state a layer in pinned host memory (up to {policy.host_store.max_bytes / 2**30:.1f} GiB, "
        f"60% of what is free; what does not fit stays on the card), the MLP in tiles of 4,096 tokens; "
        f"{'memory-efficient' if expand else 'flash'} attention."
    )
    return tokens, Devices(True, True, 4096, expand), policy.host_store


def host_available() -> int:
    """Bytes of system memory that can be taken without swapping."""
    import psutil

    return psutil.virtual_memory().available


# --- attention ------------------------------------------------------------------------------------------


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, lengths=None, expand_kv=False, **_
):
    """Causal attention within each sequence of a packed row, by torch's best kernel for the card.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]; `lengths`: the tokens of each
    sequence, in order. Returns [1, tokens, heads, head_dim].
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and expand_kv:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    kernel = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if expand_kv else contextlib.nullcontext()
    with kernel:
        outputs = [
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=grouped
            )
            for q, k, v in zip(*(x.split(lengths or [x.shape[2]], dim=2) for x in (query, key, value)), strict=True)
        ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2), None


def use_packed_attention(model: torch.nn.Module) -> None:
    """Make `model` attend by `packed_attention`; a row that names no sequences is one sequence."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)


# --- one pass -------------------------------------------------------------------------------------------


def hidden_states(
    backbone: torch.nn.Module, sequences: list[list[int]], devices: Devices, store: HostStore | None = None
) -> torch.Tensor:
    """[tokens, hidden]: the states after the last layer, before the final norm, of sequences packed into one row."""
    device = backbone.embed_tokens.weight.device
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    x = backbone.embed_tokens(tokens)[None]
    arguments = dict(
        position_embeddings=backbone.rotary_emb(x, position_ids=positions),
        attention_mask=None,
        lengths=lengths,
        expand_kv=devices.expand_kv,
    )
    if devices.gradient_checkpointing and torch.is_grad_enabled():
        x.requires_grad_()
        for index, layer in enumerate(backbone.layers):
            x = CheckpointedLayer.apply(x, layer, index, arguments, devices, store)
    else:
        for layer in backbone.layers:
            x = mlp_block(layer, attention_block(layer, x, arguments))
    return x[0]


def attention_block(layer: torch.nn.Module, x: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return x + layer.self_attn(hidden_states=layer.input_layernorm(x), **arguments)[0]


def mlp_block(layer: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h + layer.mlp(layer.post_attention_layernorm(h))


class CheckpointedLayer(torch.autograd.Function):
    """A decoder layer that keeps its input only. Gradients of its (LoRA) parameters accumulate while it runs."""

    @staticmethod
    def forward(ctx, x, layer, index, arguments, devices, store):
        ctx.layer, ctx.index, ctx.arguments, ctx.devices, ctx.store = layer, index, arguments, devices, store
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.rng = rng_state(x.device)
        if store is None or not store.put(index, x):
            ctx.save_for_backward(x)
        h = attention_block(layer, x, arguments)
        for tile in tiles(h, devices.mlp_tile_tokens):
            tile.copy_(mlp_block(layer, tile))
        return h

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0] if ctx.saved_tensors else ctx.store.get(ctx.index)
        x = x.detach().requires_grad_()
        grad_h = torch.empty_like(grad)
        with torch.enable_grad(), torch.autocast(x.device.type, ctx.autocast[1], ctx.autocast[0]), same_rng(ctx.rng, x):
            h = attention_block(ctx.layer, x, ctx.arguments)
            size = ctx.devices.mlp_tile_tokens
            for tile, grad_out, grad_in in zip(*(tiles(t.detach(), size) for t in (h, grad, grad_h)), strict=True):
                tile = tile.detach().requires_grad_()
                torch.autograd.backward(mlp_block(ctx.layer, tile), grad_out)
                grad_in.copy_(tile.grad)
        torch.autograd.backward(h, grad_h)
        return x.grad, None, None, None, None, None


def tiles(x: torch.Tensor, size: int | None) -> tuple[torch.Tensor, ...]:
    """Views of [1, tokens, ...] of at most `size` tokens."""
    return x.split(size or x.shape[1], dim=1)


def rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def same_rng(state: torch.Tensor, x: torch.Tensor):
    """Dropout draws in the recomputation what it drew in the forward pass."""
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        torch.cuda.set_rng_state(state, x.device) if x.device.type == "cuda" else torch.set_rng_state(state)
        yield


# --- host memory ----------------------------------------------------------------------------------------


class HostStore:
    """Pinned host memory for one hidden state a layer, copied on a stream of its own.

    `max_bytes` caps it; a layer that does not fit stays on the card (`put` then returns False).
    """

    def __init__(self, device: torch.device, num_layers: int, max_bytes: int) -> None:
        self.device, self.num_layers, self.max_bytes = device, num_layers, max_bytes
        self.stream = torch.cuda.Stream(device)
        self.buffer: torch.Tensor | None = None
        self.fetched: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self.kept = 0
        """layers that found room"""

    def put(self, index: int, x: torch.Tensor) -> bool:
        if index == 0:
            self._reserve(x)
        if index >= self.kept:
            return False
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._slot(index).copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # its memory may be reused only when the copy is done
        return True

    def get(self, index: int) -> torch.Tensor:
        """The state of layer `index`; the one below it is fetched meanwhile."""
        if index not in self.fetched:
            self._fetch(index)
        x, ready = self.fetched.pop(index)
        if index:
            self._fetch(index - 1)
        torch.cuda.current_stream(self.device).wait_event(ready)
        return x

    def _fetch(self, index: int) -> None:
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            x.copy_(self._slot(index), non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self.stream)
        self.fetched[index] = x, ready

    def _slot(self, index: int) -> torch.Tensor:
        return self.buffer[index * self.bytes : (index + 1) * self.bytes].view(self.dtype).view(self.shape)

    def _reserve(self, x: torch.Tensor) -> None:
        self.fetched.clear()  # of a pass that was interrupted
        self.shape, self.dtype, self.bytes = x.shape, x.dtype, x.numel() * x.element_size()
        self.kept = min(self.num_layers, self.max_bytes // self.bytes)
        needed = self.kept * self.bytes
        if self.buffer is None or self.buffer.numel() < needed:
            self.close()
            # Registered by hand: torch's pinned allocator rounds up to a power of two.
            self.buffer = torch.empty(needed, dtype=torch.uint8)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), needed, 0))
            self._unpin = weakref.finalize(self, unpin, self.buffer, self.stream)

    def close(self) -> None:
        """Unpin and free."""
        if self.buffer is not None:
            self._unpin()
        self.buffer = None


def unpin(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    # Memory that is freed while registered leaves the driver with a mapping that fails some later, innocent call.
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
