"""GRPO on one GPU: one copy of 4-bit weights, and a KV cache that gives its memory to training."""

__version__ = "0.1.0"
