"""A stop button or a fault, wherever it comes, loses no whole step and leaves a process that goes on."""

from __future__ import annotations

import gc
import shutil
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from small_runs import ROWS, STEPS, Reward, adapter, fail, figures, is_idle, once, press_stop, same, steps_of

import colab_kit as kit
from colab_kit import checkpoint, grpo, trainer

PLACES = {
    "generation": lambda patch, policy: once(patch, policy.engine.llm.llm_engine, "step", press_stop, 30),
    "waking": lambda patch, policy: once(patch, policy.engine, "resume", press_stop, 3),
    "falling asleep": lambda patch, policy: once(patch, policy.engine, "drain", press_stop, 4),
    "the loss": lambda patch, policy: once(patch, grpo, "policy_loss", press_stop, 3),
    "backward": lambda patch, policy: once(patch, torch.Tensor, "backward", press_stop, 3, before=False),
    "the optimizer step": lambda patch, policy: once(patch, trainer.Trainer, "optimizer_step", press_stop, 3),
    "clipping": lambda patch, policy: once(patch, torch.nn.utils, "clip_grad_norm_", press_stop, 3),
    "syncing": lambda patch, policy: once(patch, policy.slot, "copy_from", press_stop, 3),
    "the figures": lambda patch, policy: once(patch, trainer.Trainer, "end_step", press_stop, 3, before=False),
    "saving": lambda patch, policy: once(patch, checkpoint.files, "write", press_stop, 8),
    "renaming": lambda patch, policy: once(patch, checkpoint.files, "rename", press_stop, 2, before=False),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_loses_no_whole_step_and_the_same_process_goes_on(policy, place, uninterrupted_run, monkeypatch):
    settings = policy.settings.replace(save_steps=1, save_total_limit=9)
    with monkeypatch.context() as patch:
        PLACES[place](patch, policy)
        run = kit.train(policy, ROWS, Reward(), settings)
    assert run.status == "interrupted" and is_idle(policy)
    done = len(run.metrics)
    assert 0 < done < STEPS and steps_of(settings.output_dir)[-1] == done
    run = kit.train(policy, ROWS, Reward(), settings, resume=True)
    assert figures(run) == uninterrupted_run[0] and same(adapter(policy), uninterrupted_run[2])
    assert not list(Path(settings.output_dir).glob("*.tmp"))


def test_an_impatient_second_press_does_not_tear_the_clean_up(policy, monkeypatch):
    with monkeypatch.context() as patch:
        once(patch, checkpoint.files, "write", press_stop, 2)
        once(patch, policy.engine, "abort", press_stop)
        run = kit.train(policy, ROWS, Reward({3: press_stop}))
    assert run.status == "interrupted" and is_idle(policy) and steps_of(policy.settings.output_dir) == [2]
    with pytest.raises(KeyboardInterrupt):  # and the button works again afterwards
        press_stop()
        time.sleep(0.01)


def test_an_interrupt_before_the_first_whole_step_leaves_nothing_behind(policy, capsys):
    run = kit.train(policy, ROWS, Reward({1: press_stop}))
    assert run.status == "interrupted" and steps_of(policy.settings.output_dir) == []
    assert "nothing to save" in capsys.readouterr().out


def test_an_interrupted_sample_leaves_an_engine_that_samples_again(policy, monkeypatch):
    expected = policy.sample(ROWS[:2], temperature=0).completions
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        once(patch, policy.engine.llm.llm_engine, "step", press_stop, 5)
        policy.sample(ROWS[:2], temperature=0)
    assert is_idle(policy) and policy.sample(ROWS[:2], temperature=0).completions == expected


def test_an_update_that_fails_half_way_is_never_saved_as_a_whole_step(policy, uninterrupted_run, monkeypatch, capsys):
    settings = policy.settings.replace(save_steps=2)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="has a fault"):
        once(patch, torch.optim.AdamW, "step", fail, 3)
        kit.train(policy, ROWS, Reward(), settings)
    assert steps_of(settings.output_dir) == [2] and "half-way" in capsys.readouterr().out
    kit.train(policy, ROWS, Reward(), settings, resume=True)
    assert same(adapter(policy), uninterrupted_run[2])


def test_a_folder_that_vanishes_does_not_end_the_run(policy):
    settings = policy.settings.replace(save_steps=1)
    run = kit.train(policy, ROWS, Reward({3: lambda: shutil.rmtree(settings.output_dir)}), settings)
    assert run.status == "done" and steps_of(settings.output_dir) == [3, 4]


class Callback:
    """Stands in for a TrainerCallback that fails after step 2."""

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)

        def event(args, state, control, **_):
            if name == "on_step_end" and state.global_step == 2:
                raise ValueError("the callback has a fault")

        return event


@pytest.mark.parametrize("what", ["reward", "callback"])
def test_a_fault_in_a_users_function_saves_the_last_whole_step_and_is_passed_on(policy, what, uninterrupted_run):
    reward = Reward({3: fail}) if what == "reward" else Reward()
    with pytest.raises((RuntimeError, ValueError), match="has a fault") as caught:
        kit.train(policy, ROWS, reward, callbacks=[] if what == "reward" else [Callback()])
    assert steps_of(policy.settings.output_dir) == [2] and is_idle(policy)
    assert kit.Report.load(policy.settings.output_dir).status == "failed"
    run = kit.train(policy, ROWS, Reward(), resume=True)
    assert same(adapter(policy), uninterrupted_run[2]) and run.status == "done"
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.tb)]
    assert not any(isinstance(value, trainer.Trainer | torch.Tensor) for f in frames for value in f.values())


def test_a_kept_traceback_holds_no_optimizer(policy, monkeypatch):
    made = []
    monkeypatch.setattr(trainer, "make_optimizer", lambda *a, real=trainer.make_optimizer: keep(made, real(*a)))
    with pytest.raises(Exception, match="has a fault") as caught:
        kit.train(policy, ROWS, Reward({2: fail}))
    assert caught.value.__traceback__ is not None
    gc.collect()
    assert made[0]() is None


def keep(made, thing):
    made.append(weakref.ref(thing))
    return thing
