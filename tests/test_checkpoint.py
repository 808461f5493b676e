"""A checkpoint is whole or not there at all, and no disk, kill or tampering makes it another."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import ROWS, STEPS, FaultyFiles, Reward, adapter, content_of, fail, press_stop, same, steps_of

import colab_kit as kit
from colab_kit import checkpoint
from colab_kit.soak import WRITER


class Killed(BaseException):
    """As a kill -9 does, this ends a save with no clean-up at all."""


def test_a_kill_at_any_write_of_a_save_leaves_a_loadable_checkpoint(saved_copy, monkeypatch, capsys):
    content, at, killed = content_of(saved_copy / "checkpoint-3"), 0, True
    (saved_copy / "checkpoint-3").rename(saved_copy / "gone")
    while killed:
        at += 1
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "files", FaultyFiles(at, Killed()))
            try:
                checkpoint.write(saved_copy, 3, content)
                killed = False
            except Killed:
                pass
        found = checkpoint.find(True, saved_copy)
        assert found.step == (3 if (saved_copy / "checkpoint-3").exists() else 2)
        if found.step == 3 and killed:
            (saved_copy / "checkpoint-3").rename(saved_copy / f"done-{at}")
    assert at > 10 and not list(saved_copy.glob("*.tmp")) and capsys.readouterr().out == ""


def test_a_disk_that_fails_is_said_in_a_line_and_training_goes_on(policy, uninterrupted_run, monkeypatch, capsys):
    for at in (1, 4, 9):  # the folder, a file, the rename
        settings = policy.settings.replace(save_steps=2)
        policy.settings = settings
        start = adapter(policy)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "files", FaultyFiles(at, OSError(28, "No space left on device")))
            run = kit.train(policy, ROWS, Reward())
        said = [line for line in capsys.readouterr().out.splitlines() if "No space left" in line]
        assert run.status == "done" and len(said) == 1 and same(adapter(policy), uninterrupted_run[2])
        assert checkpoint.find(True, settings.output_dir).step == STEPS
        assert not list(Path(settings.output_dir).glob("*.tmp"))
        shutil.rmtree(settings.output_dir)
        policy.model.load_state_dict(start, strict=False)


def test_kill_9_during_a_save_loses_none_that_was_finished(saved_copy):
    for pause in (0.013, 0.031):
        command = [sys.executable, "-c", WRITER, str(saved_copy / "checkpoint-3"), str(saved_copy), "100"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        time.sleep(pause)
        child.kill()  # SIGKILL
        finished = [100] + [int(line) for line in child.stdout.read().split()]
        child.wait()
        assert set(steps_of(saved_copy)) >= set(finished)
        for folder in checkpoint.folders(saved_copy):
            checkpoint.read(folder)
            if int(folder.name[11:]) >= 100:
                folder.rename(folder.with_name(f"from-before-{pause}-{folder.name}"))


@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.MANIFEST])
@pytest.mark.parametrize("harm", ["a byte changed", "cut short", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(saved_copy, name, harm, capsys):
    file = saved_copy / "checkpoint-3" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(bytes(data) if harm == "a byte changed" else bytes(data)[: len(data) // 2])
    with pytest.raises(checkpoint.DamagedCheckpoint, match="checkpoint-3"):
        checkpoint.find(saved_copy / "checkpoint-3", "unused")
    assert checkpoint.find(True, saved_copy).step == 2
    said = capsys.readouterr().out
    assert "checkpoint-3 is damaged" in said or "format" in said


def test_nothing_in_a_checkpoint_is_a_pickle(saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("torch.load", refuse)
    read = checkpoint.read(saved / "checkpoint-3")
    assert read.step == 3 and len(read.rows) == 3
    names = {path.name for path in (saved / "checkpoint-3").iterdir()}
    assert names == {*checkpoint.FILES, checkpoint.MANIFEST}


def test_the_last_checkpoints_stay_and_the_one_with_the_best_reward(policy, monkeypatch):
    values = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    settings = policy.settings.replace(max_steps=5, save_steps=1, save_total_limit=2)
    monkeypatch.setattr(checkpoint, "REWARD_STEPS", 1)

    def at_each_step(prompts, completions, **_):
        value = next(values)
        return [value] * len(completions)

    kit.train(policy, ROWS, at_each_step, settings)
    assert steps_of(policy.settings.output_dir) == [2, 4, 5]


def test_saving_by_minutes(policy, monkeypatch):
    from colab_kit import saves

    clock = iter(range(0, 100_000, 25))  # each look at the clock is 25 s later
    monkeypatch.setattr(saves.time, "monotonic", lambda: next(clock))
    kit.train(policy, ROWS, Reward(), policy.settings.replace(save_minutes=1, max_steps=4, save_total_limit=9))
    assert 1 < len(steps_of(policy.settings.output_dir)) <= 4


@pytest.mark.parametrize("ends", ["done", "interrupted"])
def test_on_save_comes_when_the_checkpoint_is_there(policy, ends):
    from transformers import TrainerCallback

    saved = []

    class Uploads(TrainerCallback):
        def on_save(self, args, state, control, **_):
            checkpoint.read(f"{args.output_dir}/checkpoint-{state.global_step}")
            saved.append(state.global_step)

    reward = Reward({4: press_stop} if ends == "interrupted" else None)
    kit.train(policy, ROWS, reward, policy.settings.replace(save_steps=2), callbacks=[Uploads()])
    assert saved == ([2, 4] if ends == "done" else [2, 3])


def test_a_fault_in_on_save_neither_loses_the_checkpoint_nor_hides_an_interrupt(policy, capsys):
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_save(self, *_, **__):
            fail()

    with pytest.raises(RuntimeError, match="has a fault"):
        kit.train(policy, ROWS, Reward(), policy.settings.replace(save_steps=1), callbacks=[Fails()])
    assert steps_of(policy.settings.output_dir) == [1]
    run = kit.train(policy, ROWS, Reward({2: press_stop}), callbacks=[Fails()], resume=True)
    assert run.status == "interrupted" and steps_of(policy.settings.output_dir) == [1, 2]
    assert "Interrupted after step 2" in capsys.readouterr().out
