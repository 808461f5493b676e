"""Checkpoints: all of a run that can't be computed again, whole or not there at all, read without pickle.

`output_dir/checkpoint-12` holds the run as it was after step 12: plain PEFT files, `training.safetensors` (optimizer
and random generators), `state.json`, the figures of the steps (`metrics.jsonl`) and `manifest.json`, which is written
last and has the SHA-256 of the others. The folder is written as `checkpoint-12.tmp`, flushed to the disk, and renamed;
a folder under any other name is never taken for a checkpoint. What is a pure function of the step (prompts, sampling
seeds, learning rate) is not stored.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from . import optimizer as state_of
from .dashboard.report import clean
from .interrupts import uninterrupted

if TYPE_CHECKING:
    from .data import Prompts
    from .presets import Settings
    from .trainer import Trainer

FORMAT = 1
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
FILES = (*ADAPTER, "training.safetensors", "state.json", "metrics.jsonl")
MANIFEST = "manifest.json"
REWARD_STEPS = 5
"""a checkpoint's reward, by which the best is kept, is the mean of this many steps: one step's is mostly chance"""
# Changed, these would make another run of it: the adapter would not fit, or the prompts and seeds would be others.
FIXED = ("model_name_or_path", "load_in_4bit", "lora_r", "lora_alpha", "lora_target_modules", "num_generations",
         "seed", "shuffle_dataset")  # fmt: skip


class DamagedCheckpoint(ValueError):
    """A checkpoint that is torn, was tampered with, or is of an unknown format."""


class Files:
    """Whatever changes the disk goes through here, so that tests can fail each of it."""

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def write(self, path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounted drives can't flush a folder
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, folder: Path) -> None:
        # Renamed first, so that a checkpoint is never half there.
        if folder.suffix != ".tmp":
            folder = folder.rename(folder.with_name(folder.name + ".tmp"))
        shutil.rmtree(folder)


files = Files()


@dataclasses.dataclass
class Checkpoint:
    """What was read from a folder, all of it verified."""

    folder: Path
    state: dict[str, Any]
    adapter: dict[str, torch.Tensor]
    training: dict[str, torch.Tensor]
    rows: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return self.state["step"]


def folders(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a folder, oldest step first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*")]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


# --- writing --------------------------------------------------------------------------------------------


def contents(trainer: Trainer) -> dict[str, bytes]:
    """The files of a checkpoint of the last whole step."""
    from safetensors.torch import save

    from .adapter import adapter_files

    tensors, numbers = state_of.optimizer_state(trainer.optimizer, trainer.names)
    rng, rng_tensors = trainer.rng
    tensors = {f"optimizer|{key}": value for key, value in tensors.items()}
    tensors |= {f"rng|{key}": value for key, value in rng_tensors.items()}
    rows = trainer.report.steps
    state = {
        "format": FORMAT,
        "step": trainer.steps_done,
        "reward": mean_reward(rows),
        "settings": dataclasses.asdict(trainer.settings),
        "prompts": fingerprint(trainer.prompts),
        "optimizer": {"class": type(trainer.optimizer).__name__, "numbers": numbers},
        "scheduler": {"last_epoch": trainer.scheduler.last_epoch},
        "scaler": trainer.scaler.state_dict(),
        "rng": rng,
    }
    return adapter_files(trainer.model) | {
        "training.safetensors": save(tensors),
        "state.json": json.dumps(state).encode(),
        "metrics.jsonl": "".join(json.dumps(clean(row)) + "\n" for row in rows).encode(),
    }


def write(output_dir: Path, step: int, content: dict[str, bytes]) -> Path:
    """One checkpoint. Raises OSError; the folder then is not there, or is there under its temporary name."""
    folder, temporary = output_dir / f"checkpoint-{step}", output_dir / f"checkpoint-{step}.tmp"
    for left in output_dir.glob("checkpoint-*.tmp"):  # by a save that was cut short
        files.remove(left)
    files.make(temporary)
    for name, data in content.items():
        files.write(temporary / name, data)
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    files.write(temporary / MANIFEST, json.dumps({"format": FORMAT, "sha256": manifest}, indent=1).encode())
    files.sync(temporary)
    files.rename(temporary, folder)
    files.sync(output_dir)
    return folder


def mean_reward(rows: list[dict[str, Any]]) -> float | None:
    rewards = [row["reward"] for row in rows[-REWARD_STEPS:] if isinstance(row.get("reward"), float | int)]
    return fmean(rewards) if rewards else None


def fingerprint(prompts: Prompts) -> dict[str, Any]:
    ids = json.dumps(prompts.prompt_ids).encode()
    return {"count": len(prompts), "sha256": hashlib.sha256(ids).hexdigest()}


# --- reading --------------------------------------------------------------------------------------------


def read(folder: str | Path) -> Checkpoint:
    """Raises DamagedCheckpoint, naming the file, unless every byte is the one that was written."""
    from safetensors.torch import load

    folder, content = Path(folder), {}
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = manifest["sha256"]
        if manifest["format"] != FORMAT or set(expected) != set(FILES):
            raise DamagedCheckpoint(f"{folder} is of a format that this version can't read")
        for name in FILES:
            content[name] = (folder / name).read_bytes()
            if hashlib.sha256(content[name]).hexdigest() != expected[name]:
                raise DamagedCheckpoint(f"{folder} is damaged: {name} is not as it was written")
        rows = [json.loads(line) for line in content["metrics.jsonl"].decode().splitlines()]
        state = json.loads(content["state.json"])
        return Checkpoint(folder, state, load(content[ADAPTER[1]]), load(content["training.safetensors"]), rows)
    except DamagedCheckpoint:
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {type(error).__name__}: {error}") from None


def find(resume: bool | str | Path, output_dir: str | Path) -> Checkpoint | None:
    """The checkpoint to go on from: the newest of `output_dir` that is whole (True), or of the folder that is named.

    Prints a line for each that is passed over. None: there is none. Raises DamagedCheckpoint if the one that was named,
    or each one there, is damaged; FileNotFoundError for a folder that is not there.
    """
    place = Path(output_dir) if resume is True else Path(resume)
    if resume is not True and not place.is_dir():
        raise FileNotFoundError(f"resume={str(resume)!r}: there is no such folder")
    if resume is not True and not folders(place):
        return read(place)
    damaged = []
    for folder in reversed(folders(place)):
        try:
            return read(folder)
        except DamagedCheckpoint as error:
            print(f"{error}: the checkpoint before it is tried")
            damaged.append(folder.name)
    if damaged:
        raise DamagedCheckpoint(
            f"no checkpoint in {place} can be read ({', '.join(damaged)}): remove them, or train without resume"
        )
    print(f"no checkpoint in {place}: starting from the beginning")
    return None


def check_settings(checkpoint: Checkpoint, settings: Settings, prompts: Prompts, optimizer: Any) -> None:
    """Lists the settings that changed since. Raises ValueError for those that would make it another run."""
    then, now = checkpoint.state["settings"], json.loads(json.dumps(dataclasses.asdict(settings)))
    load = f"policy.load_adapter({str(checkpoint.folder)!r})"
    instead = f"to start a new run from its adapter: {load}, then train without resume"
    sizes = [(s["per_device_train_batch_size"] * s["gradient_accumulation_steps"]) for s in (then, now)]
    changes = {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}
    fixed = {name: changes[name] for name in FIXED if name in changes}
    if sizes[0] != sizes[1]:
        fixed["per_device_train_batch_size x gradient_accumulation_steps"] = sizes
    if checkpoint.state["optimizer"]["class"] != type(optimizer).__name__:
        fixed["optim"] = (checkpoint.state["optimizer"]["class"], type(optimizer).__name__)
    if fixed:
        words = "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in fixed.items())
        raise ValueError(f"can't go on from {checkpoint.folder}: {words}. Set it back, or, {instead}")
    was, is_now = checkpoint.state["prompts"], fingerprint(prompts)
    if was != is_now:
        raise ValueError(
            f"can't go on from {checkpoint.folder}: its dataset gave {was['count']} prompts and this one gives "
            f"{is_now['count']}, or others. Use the same rows and max_prompt_length, or, {instead}"
        )
    if changes:
        print("changed since: " + ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items()))


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put what was read into the run: all of it, or (an interrupt waits) nothing."""
    from .adapter import set_adapter

    state, training = checkpoint.state, {}
    for key, tensor in checkpoint.training.items():
        kind, _, name = key.partition("|")
        training.setdefault(kind, {})[name] = tensor
    with uninterrupted():
        trainer.policy.standby.sleep()
        set_adapter(trainer.model, checkpoint.adapter, checkpoint.folder)
        numbers = state["optimizer"]["numbers"]
        state_of.load_optimizer_state(trainer.optimizer, trainer.names, training.get("optimizer", {}), numbers)
        state_of.set_schedule(trainer.scheduler, state["scheduler"]["last_epoch"])
        if trainer.scaler.is_enabled() and state["scaler"]:
            trainer.scaler.load_state_dict(state["scaler"])
        trainer.rng = state["rng"], training["rng"]
        state_of.set_rng_state(*trainer.rng)
        trainer.steps_done = checkpoint.step
