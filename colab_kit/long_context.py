"""Fitting long sequences in one pass: packing, checkpoints in host memory, the MLP in tiles.

What a training pass keeps alive decides how long a sequence can be. Here it keeps one hidden state a layer, in pinned
host memory when the card is short, copied on a stream of its own while the layer computes and fetched one layer ahead
in the backward pass. A layer's backward recomputes its attention, then takes the MLP tile by tile, forward and
backward at once: the MLP is the layer's last operation, so its output is never needed again, and tiling costs no
second recomputation. Values and gradients are those of the plain pass.
"""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .planning import sizes
from .training_pass import GIB, Devices, choose_devices, expands_kv, host_room, keep_layers, micro_batch_tokens

if TYPE_CHECKING:
    from .host_store import HostStore
    from .policy import Policy
    from .presets import Settings

ATTENTION = "colab_kit_packed"


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


def choose_pass(policy: Policy, settings: Settings):
    """(tokens a micro-batch, memory devices, host store, estimated bytes) for this run's training passes, from the
    memory that is free now; prints what and why.

    Raises: MemoryError where a sequence of full length can't fit, with the longest that can.
    """
    from .host_store import HostStore

    config, itemsize = policy.model.get_base_model().config, policy.engine.dtype.itemsize
    if policy.device.type == "cpu":
        tokens, _ = micro_batch_tokens(config, settings, itemsize, None, False)
        devices = Devices(settings.gradient_checkpointing is True)
        print(f"Training pass: micro-batches of at most {tokens:,} tokens; {devices} (a CPU).")
        return tokens, devices, None, 0
    expand = expands_kv(settings, torch.cuda.get_device_capability(policy.device))
    planned = sizes(config, settings, itemsize)
    policy.engine.give_back_cached_blocks()
    free, host = policy.engine.free_bytes(), host_room()
    others = planned.gradients + planned.optimizer
    room = free - others
    spare = min(free, unused(policy, settings)) - others if settings.gradient_checkpointing is None else 0
    tokens, why = micro_batch_tokens(config, settings, itemsize, room, expand, spare)
    devices, needed = choose_devices(config, settings, itemsize, tokens, room, host, expand)
    devices, needed = keep_layers(config, itemsize, tokens, devices, needed, spare)
    print(
        f"Training pass: micro-batches of at most {tokens:,} tokens ({why}); {devices}: about {needed / GIB:.2f} GiB "
        f"of the {room / GIB:.2f} that are free for it."
    )
    if not devices.activation_offloading:
        return tokens, devices, None, needed
    states = config.num_hidden_layers * tokens * config.hidden_size * itemsize
    if states > host:
        print(
            f"System memory has room for {host / GIB:.1f} of the {states / GIB:.1f} GiB of hidden states (60% of what "
            f"is free): the rest stays on the card."
        )
    if policy.host_store is None:
        policy.host_store = HostStore(policy.device, config.num_hidden_layers, host)
    return tokens, devices, policy.host_store, needed


def unused(policy: Policy, settings: Settings) -> int:
    """Bytes up to vllm_gpu_memory_utilization: where it is set, a pass takes more if it must, not to be faster."""
    total = torch.cuda.get_device_properties(policy.device).total_memory
    return int((settings.vllm_gpu_memory_utilization or 1) * total) - policy.ledger.sample()


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


def prepare_model(model: torch.nn.Module) -> None:
    """Make `model` attend by `packed_attention` (a row that names no sequences is one sequence) and, on a GPU, take its
    norms in one kernel."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and module.weight.is_cuda:
            module.forward = types.MethodType(rms_norm, module)


def rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A transformers RMSNorm that keeps x and one number a row for its backward, not a float32 copy of x."""
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


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
    recomputed = devices.recomputed(len(backbone.layers)) if torch.is_grad_enabled() else 0
    if recomputed:
        x.requires_grad_()
    for index, layer in enumerate(backbone.layers):
        if index < recomputed:
            x = CheckpointedLayer.apply(x, layer, index, arguments, devices, store)
        else:
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
        grad = grad.contiguous()  # tile by tile it becomes the MLP's input gradient: no second buffer
        with torch.enable_grad(), torch.autocast(x.device.type, ctx.autocast[1], ctx.autocast[0]), same_rng(ctx.rng, x):
            h = attention_block(ctx.layer, x, ctx.arguments)
            edge, h = get_gradient_edge(h), h.detach()
            size = ctx.devices.mlp_tile_tokens
            for tile, part in zip(tiles(h, size), tiles(grad, size), strict=True):
                tile = tile.detach().requires_grad_()
                torch.autograd.backward(mlp_block(ctx.layer, tile), part)
                part.copy_(tile.grad)
        del h, tile, part  # the attention's backward needs the graph, not the value
        torch.autograd.backward(edge, grad)
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
