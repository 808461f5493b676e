"""GRPO on one GPU: one copy of 4-bit weights, and a KV cache that gives its memory to training.

Importing this module loads neither torch nor vLLM, so that `enable_standby()` can run before they do.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import presets
from .presets import Settings
from .rewards import try_rewards
from .standby import enable_standby

__version__ = "0.1.0"

_LAZY = {
    "load": "policy",
    "unload": "policy",
    "Policy": "policy",
    "train": "trainer",
    "plan": "planning",
    "Run": "run",
    "Report": "dashboard",
    "install": "installing",
    "hub_token": "colab",
    "run_folder": "colab",
}
_MODULES = ("benchmark", "data", "preflight", "rewards")  # kit.preflight is a module that can be called

__all__ = ["Settings", "enable_standby", "presets", "try_rewards", *_MODULES, *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
