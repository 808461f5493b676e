"""What training keeps besides the adapter: optimizer, schedule, loss scale, random generators; in and out as plain
tensors and numbers, so that a checkpoint needs no pickle."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Any

import torch

from .presets import Settings

SEPARATOR = "|"  # in no module's name


def make_optimizer(parameters: list[torch.nn.Parameter], s: Settings, device: torch.device):
    """AdamW: torch's on a CPU; bitsandbytes' 8-bit on a GPU, whose states take a quarter of the memory."""
    kwargs = dict(
        lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), eps=s.adam_epsilon, weight_decay=s.weight_decay
    )
    name = s.optim if s.optim != "auto" else "adamw_torch" if device.type == "cpu" else "adamw_8bit"
    if name == "adamw_torch":
        return torch.optim.AdamW(parameters, **kwargs)
    import bitsandbytes as bnb

    class InOrder(bnb.optim.PagedAdamW8bit if name == "paged_adamw_8bit" else bnb.optim.AdamW8bit):
        """Its kernels run on CUDA's default stream (bitsandbytes' pull request 2050), and vLLM makes another stream
        torch's current one: the first step read states that were not zeros yet, and the adapter got NaN."""

        def step(self, closure=None):
            if device.type != "cuda":
                return super().step(closure)
            current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
            default.wait_stream(current)
            with torch.cuda.stream(default):
                loss = super().step(closure)
            current.wait_stream(default)
            return loss

    return InOrder(parameters, **kwargs)


def make_scheduler(optimizer: Any, s: Settings) -> Any:
    from transformers import get_scheduler

    return get_scheduler(s.lr_scheduler_type, optimizer, s.warmup_steps, s.max_steps)


def optimizer_state(optimizer: Any, names: Iterable[str]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Tensors and numbers of an optimizer whose parameters are called `names`, in their order."""
    tensors, numbers = {}, {}
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            if key.startswith("qmap"):  # bitsandbytes' tables: constants
                continue
            if isinstance(value, torch.Tensor):
                tensors[f"{name}{SEPARATOR}{key}"] = value.detach().cpu().contiguous()
            else:
                numbers[f"{name}{SEPARATOR}{key}"] = value
    return tensors, numbers


def load_optimizer_state(
    optimizer: Any, names: Iterable[str], tensors: dict[str, torch.Tensor], numbers: dict[str, float]
) -> None:
    """The opposite. Raises ValueError for a tensor that has no place, or another shape than its place."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in (tensors | numbers).items():
        name, _, leaf = key.rpartition(SEPARATOR)
        states.setdefault(name, {})[leaf] = value
    names, parameters = list(names), list(_parameters(optimizer))
    if unknown := set(states) - set(names):
        raise ValueError(f"the optimizer has no parameter {sorted(unknown)[0]}")
    if not hasattr(optimizer, "init_state"):
        state = {i: states[name] for i, name in enumerate(names) if name in states}
        for i, values in state.items():
            for leaf, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameters[i].shape:
                    raise ValueError(f"{names[i]} has another shape than its {leaf}")
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    # bitsandbytes: its own buffers, so that large ones stay in memory that the driver can page out
    optimizer.check_overrides()
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if name not in states:
            continue
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
        mine = optimizer.state[parameter]
        for leaf, value in states[name].items():
            if isinstance(value, torch.Tensor):
                if leaf not in mine or mine[leaf].shape != value.shape:
                    raise ValueError(f"{name} has another shape than its {leaf}")
                mine[leaf].copy_(value)
            else:
                mine[leaf] = value


def _parameters(optimizer: Any) -> Iterable[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def set_schedule(scheduler: Any, last_epoch: int) -> None:
    """Go on after `last_epoch` optimizer steps, by this scheduler's own rule (all of ours are pure functions)."""
    scheduler.last_epoch, scheduler._step_count = last_epoch, last_epoch + 1
    scheduler._last_lr = [
        base * rule(last_epoch) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, learning_rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = learning_rate


def rng_state() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Python's and numpy's generators as JSON can hold them, torch's and CUDA's as tensors."""
    import numpy

    kind, keys, *rest = numpy.random.get_state()
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}, tensors


def set_rng_state(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    import numpy

    version, internal, gauss = plain["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = plain["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


@contextlib.contextmanager
def preserved_rng():
    """vLLM seeds Python's, numpy's and torch's generators at start; give the caller's back."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(*before)
