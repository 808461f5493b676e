"""Fitting long sequences: packing without padding, attention kept within each sequence."""

from __future__ import annotations

import torch
from torch.nn import functional as F

ATTENTION = "colab_kit_packed"


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped so that no group holds more than `max_tokens` tokens (a longer sequence is alone).

    The longest come first: if memory runs out, it does so in the first micro-batch of the first step.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    room = 0
    for i in order:
        if not groups or lengths[i] > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(i)
        room -= lengths[i]
    return groups


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sequence_lengths=None, **_):
    """Causal attention within each sequence of a packed row, by torch's best kernel for the card.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]; `sequence_lengths`: the tokens
    of each sequence, in order. Returns [1, tokens, heads, head_dim].
    """
    outputs = []
    for q, k, v in zip(*(x.split(sequence_lengths or [x.shape[2]], dim=2) for x in (query, key, value)), strict=True):
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def use_packed_attention(model: torch.nn.Module) -> None:
    """Make `model` attend by `packed_attention`; a row that names no sequences is one sequence."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    model.set_attn_implementation(ATTENTION)


def hidden_states(backbone: torch.nn.Module, sequences: list[list[int]], device: torch.device) -> torch.Tensor:
    """[tokens, hidden]: the last hidden states of some sequences, packed into one row without padding."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
    output = backbone(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        sequence_lengths=[len(sequence) for sequence in sequences],
    )
    return output.last_hidden_state[0]
