"""When a run saves and what it keeps; and what happens when it ends before its time."""

from __future__ import annotations

import gc
import json
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoint
from .interrupts import OneInterrupt

if TYPE_CHECKING:
    from .policy import Policy
    from .trainer import Trainer

OURS = ("colab_kit", "torch", "transformers", "peft", "bitsandbytes", "vllm")


class Checkpoints:
    """When a run saves, what it keeps, and what it says when it can't."""

    def __init__(self, trainer: Trainer, resumed: checkpoint.Checkpoint | None) -> None:
        s = trainer.settings
        self.trainer, self.folder = trainer, Path(s.output_dir)
        self.every, self.minutes, self.limit = s.save_steps, s.save_minutes, s.save_total_limit
        self.saved_step = resumed.step if resumed else 0
        self.last: Path | None = resumed.folder if resumed else None
        own = resumed is not None and resumed.folder.resolve().parent == self.folder.resolve()
        self.kept_up_to: int | None = resumed.step if own else 0
        self.clock = time.monotonic()

    def save_if_due(self, asked: bool = False) -> None:
        """After a whole step: every `save_steps` steps, every `save_minutes` minutes, or when a callback asks."""
        step, last = self.trainer.steps_done, self.trainer.steps_done >= self.trainer.settings.max_steps
        by_time = self.minutes is not None and time.monotonic() - self.clock >= 60 * self.minutes
        by_step = self.every is not None and step % self.every == 0
        if asked or by_time or by_step or (last and (self.every or self.minutes)):
            self.trainer.dashboard.phase("saving")
            self.save()

    def save(self) -> bool:
        """A checkpoint of the last whole step, if there is none yet, and the callbacks' `on_save`. A disk that fails is
        reported, not raised."""
        step = self.trainer.steps_done
        if step == self.saved_step:
            return True
        self.clock = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._set_earlier_aside()
            self.last = checkpoint.write(self.folder, step, checkpoint.contents(self.trainer))
            self.saved_step = step
            self._remove_old()
        except OSError as error:
            what = "was written, but old ones could not be removed" if self.saved_step == step else "was not written"
            print(f"the checkpoint of step {step} {what} ({error}); training goes on")
        if self.saved_step == step:
            self.trainer.callbacks.saved(step)
        return self.saved_step == step

    def _set_earlier_aside(self) -> None:
        """Checkpoints that are not of this run's past are kept, but resume must not take them for it."""
        if self.kept_up_to is None:
            return
        others = [folder for folder in checkpoint.folders(self.folder) if int(folder.name[11:]) > self.kept_up_to]
        if others:
            number = 1 + max(
                (int(p.name[8:]) for p in self.folder.glob("earlier-*") if p.name[8:].isdigit()), default=0
            )
            place = self.folder / f"earlier-{number}"
            checkpoint.files.make(place)
            for folder in others:
                checkpoint.files.rename(folder, place / folder.name)
            names = ", ".join(folder.name for folder in others)
            print(f"{names}: not of the run that goes on here, moved to {place}")
        self.kept_up_to = None

    def _remove_old(self) -> None:
        """All but the last `save_total_limit` and the one with the best reward."""
        present = checkpoint.folders(self.folder)
        rewards = {}
        for folder in present:
            try:
                rewards[folder] = json.loads((folder / "state.json").read_bytes())["reward"]
            except (OSError, ValueError, KeyError, TypeError):
                rewards[folder] = None
        scored = [folder for folder in present if isinstance(rewards[folder], float | int)]
        best = max(scored, key=lambda folder: rewards[folder], default=None)
        for folder in present[: -self.limit]:
            if folder != best:
                checkpoint.files.remove(folder)


class Rescue(OneInterrupt):
    """Around a run: however it ends, the engine sleeps, gradients and cached memory are gone; before its time, the last
    whole step is saved and a sentence says how to go on. An interrupt ends here; any other exception passes on."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        trainer, interrupted = self.trainer, kind is not None and issubclass(kind, KeyboardInterrupt)
        self._pressed = True  # from here on, a press changes nothing
        try:
            tidy(trainer)
            if kind is not None:
                print(self.save(interrupted), flush=True)
            if trainer.report.status == "running":  # it ended before the dashboard was open
                trainer.report.finish("interrupted" if interrupted else "failed", str(error or ""))
        finally:
            super().__exit__()
        return interrupted

    def save(self, interrupted: bool) -> str:
        trainer, saves, total = self.trainer, self.trainer.checkpoints, self.trainer.settings.max_steps
        step, how = trainer.steps_done, "run the cell again with resume=True to go on from there"
        said = f"{'Interrupted' if interrupted else 'Stopped by an error'} after step {step} of {total}"
        if trainer.half_done:
            kept = f"the last checkpoint is {saves.last}: {how}" if saves.last else "there is no checkpoint"
            return f"{said}, half-way through the update of step {step + 1}, so this state is not saved; {kept}"
        if not step:
            return f"{said}: nothing was learned yet, so there is nothing to save"
        try:
            saves.save()
        except Exception:  # a callback's on_save: what ended the run is passed on, not this
            traceback.print_exc()
        if saves.saved_step == step:
            return f"{said} ({saves.last}); {how}"
        kept = f"the last checkpoint is {saves.last}" if saves.last else "there is no checkpoint"
        return f"{said}; {kept}. The adapter is still in memory: policy.save(folder) keeps it"


def tidy(trainer: Trainer) -> None:
    """The policy as a run found it: engine asleep, adapter switched on, no gradients, evaluation mode."""
    trainer.policy.standby.sleep()
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.model.base_model.enable_adapter_layers()  # an interrupt may have come while the reference was computed
    trainer.model.eval()
    if trainer.host_store is not None:
        trainer.host_store.fetched.clear()


def forget_frames(error: BaseException) -> None:
    """Notebooks keep the last traceback, and its frames would keep activations: drop the locals of all but the
    user's own functions, which a debugger may want."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
                try:
                    frame.clear()
                except RuntimeError:  # still running: a caller of train
                    pass
        error = error.__cause__ or error.__context__


def release_memory(policy: Policy) -> None:
    """An optimizer and its scheduler hold each other: only the collector finds them."""
    gc.collect()
    if policy.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
