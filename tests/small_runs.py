"""Small runs on the tiny policy, what disturbs them, and how two compare. The fixtures over them are in conftest.py."""

from __future__ import annotations

import signal

import torch

import colab_kit as kit
from colab_kit import checkpoint

ROWS = [{"prompt": f"w{i} w{i + 7} w{2 * i + 1}"} for i in range(20)]
STEPS = 4


class Reward:
    """Pays for tokens with odd ids; calls `at[n]` in the n-th call, if there is one."""

    __name__ = "odd"

    def __init__(self, at: dict | None = None) -> None:
        self.calls, self.at, self.prompts = 0, at or {}, []

    def __call__(self, prompts, completions, completion_ids, **_):
        self.calls += 1
        self.prompts.append(list(prompts))
        if self.calls in self.at:
            self.at[self.calls]()
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def press_stop(*_):
    signal.raise_signal(signal.SIGINT)


def fail():
    raise RuntimeError("the reward function has a fault")


def adapter(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora_" in name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def figures(run):
    return [{key: value for key, value in row.items() if "time" not in key} for row in run.metrics]


def steps_of(folder):
    return [int(path.name[11:]) for path in checkpoint.folders(folder)]


def is_idle(policy):
    return (
        not policy.standby.is_awake
        and not policy.engine.core.scheduler.has_requests()
        and all(p.grad is None for p in policy.model.parameters())
    )


def once(patch, owner, name, act, call=1, before=True):
    """Makes the `call`-th call of `owner.name` also `act`."""
    real, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if before and len(calls) == call:
            act()
        result = real(*args, **kwargs)
        if not before and len(calls) == call:
            act()
        return result

    patch.setattr(owner, name, wrapped)


class FaultyFiles(checkpoint.Files):
    """Fails at the `at`-th change of the disk; a write is torn in the middle."""

    def __init__(self, at, error):
        self.count, self.at, self.error = 0, at, error


def _faulty(name):
    def change(self, path, *more):
        self.count += 1
        if self.count == self.at:
            if name == "write":
                path.write_bytes(more[0][: len(more[0]) // 2])
            raise self.error
        return getattr(checkpoint.Files, name)(self, path, *more)

    return change


for _name in ("make", "write", "sync", "rename", "remove"):
    setattr(FaultyFiles, _name, _faulty(_name))


def content_of(folder):
    return {name: (folder / name).read_bytes() for name in checkpoint.FILES}


def resume(policy, folder, rows=ROWS, **changes):
    settings = policy.settings.replace(
        output_dir=str(folder), max_steps=3, save_steps=1, save_total_limit=3, lr_scheduler_type="constant_with_warmup",
        warmup_steps=0, learning_rate=5e-3,
    )  # fmt: skip
    return kit.train(policy, rows, Reward(), settings.replace(**changes), resume=True)
