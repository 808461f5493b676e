"""Nothing is lost: what a run that is stopped, killed, tampered with or run twice promises. On a real engine."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch

import colab_kit as kit
from colab_kit import checkpoint, grpo, trainer
from colab_kit.optimizer import load_optimizer_state, make_optimizer, make_scheduler, optimizer_state, set_schedule

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


@pytest.fixture
def policy(tiny_policy, tmp_path, monkeypatch):
    """The tiny policy with a fresh adapter and settings of its own: linear schedule, warm-up, dropout."""
    monkeypatch.setenv("COLAB_KIT_DASHBOARD", "off")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before = tiny_policy.settings
    fresh = before.replace(
        output_dir=str(tmp_path / "run"), max_steps=STEPS, lr_scheduler_type="linear", warmup_steps=2
    )
    tiny_policy.settings = fresh
    start = {key: value.clone() for key, value in tiny_policy.model.state_dict().items() if "lora_" in key}
    yield tiny_policy
    signal.signal(signal.SIGINT, handler)
    kit.load(before)
    tiny_policy.model.load_state_dict(start, strict=False)
    tiny_policy.sync()


def adapter(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora_" in name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def figures(run):
    return [{key: value for key, value in row.items() if "time" not in key} for row in run.metrics]


def steps_of(folder):
    return [int(path.name[11:]) for path in checkpoint.folders(folder)]


@pytest.fixture(scope="session")
def uninterrupted_run(tiny_policy, tmp_path_factory):
    """What the run gives when nothing happens: figures, prompts, adapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAB_KIT_DASHBOARD", "off")
        start, reward = adapter(tiny_policy), Reward()
        settings = tiny_policy.settings.replace(
            output_dir=str(tmp_path_factory.mktemp("whole")),
            max_steps=STEPS,
            lr_scheduler_type="linear",
            warmup_steps=2,
        )
        run = kit.train(tiny_policy, ROWS, reward, settings)
        end = adapter(tiny_policy)
        tiny_policy.model.load_state_dict(start, strict=False)
        tiny_policy.sync()
    assert not same(start, end)
    return figures(run), reward.prompts, end


def is_idle(policy):
    return (
        not policy.standby.is_awake
        and not policy.engine.core.scheduler.has_requests()
        and all(p.grad is None for p in policy.model.parameters())
    )


# --- stopping and going on ------------------------------------------------------------------------------


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(policy, uninterrupted_run, capsys):
    first, second = Reward({4: press_stop}), Reward()
    run = kit.train(policy, ROWS, first)
    assert run.status == "interrupted" and len(run.metrics) == 3 and is_idle(policy)
    assert "Interrupted after step 3 of 4" in capsys.readouterr().out
    with torch.no_grad():  # another process would start from a fresh adapter and other generators
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.5)
    torch.manual_seed(99)
    run = kit.train(policy, ROWS, second, resume=True)
    rows, prompts, end = uninterrupted_run
    assert run.status == "done"
    assert figures(run) == rows
    assert first.prompts[:3] + second.prompts == prompts
    assert same(adapter(policy), end)
    assert kit.Report.load(policy.settings.output_dir).steps == run.metrics


def test_dropout_and_several_optimizer_steps_a_rollout_go_on_bit_for_bit_too(policy, tmp_path):
    policy = kit.load(policy.settings.replace(lora_dropout=0.2, num_iterations=2))
    start = adapter(policy)
    whole = kit.train(policy, ROWS, Reward())
    end = adapter(policy)
    policy.model.load_state_dict(start, strict=False)
    settings = policy.settings.replace(output_dir=str(tmp_path / "other"))
    kit.train(policy, ROWS, Reward({3: press_stop}), settings)
    run = kit.train(policy, ROWS, Reward(), settings, resume=True)
    assert figures(run) == figures(whole) and same(adapter(policy), end)


@pytest.mark.parametrize("name", ["adamw_torch", "paged_adamw_8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers")
def test_an_optimizer_goes_on_bit_for_bit_from_plain_tensors(name):
    from safetensors.torch import load, save

    settings = kit.Settings(optim=name, lr_scheduler_type="cosine", warmup_steps=2, max_steps=9)

    def start():
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, n).reshape(-1, 64)) for n in (8192, 64)]
        optimizer = make_optimizer(parameters, settings, torch.device("cpu"))
        return parameters, optimizer, make_scheduler(optimizer, settings)

    def steps(parameters, optimizer, scheduler, first, last):
        for step in range(first, last):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * step)
            optimizer.step()
            scheduler.step()

    whole, stopped, resumed = start(), start(), start()
    steps(*whole, 0, 6)
    steps(*stopped, 0, 3)
    tensors, numbers = optimizer_state(stopped[1], ["a", "b"])
    if name == "paged_adamw_8bit":
        assert tensors["a|state1"].dtype == torch.uint8
    for parameter, value in zip(resumed[0], stopped[0], strict=True):
        parameter.data.copy_(value)
    load_optimizer_state(resumed[1], ["a", "b"], load(save(tensors)), json.loads(json.dumps(numbers)))
    set_schedule(resumed[2], stopped[2].last_epoch)
    steps(*resumed, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole[0], resumed[0], strict=True))
    assert whole[2].get_last_lr() == resumed[2].get_last_lr()


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


# --- what is on the disk --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def saved(tiny_policy, tmp_path_factory):
    """A folder with checkpoints of steps 1 to 3."""
    folder, start = tmp_path_factory.mktemp("saved"), adapter(tiny_policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAB_KIT_DASHBOARD", "off")
        settings = tiny_policy.settings.replace(
            output_dir=str(folder), max_steps=3, save_steps=1, save_total_limit=3, learning_rate=5e-3
        )
        kit.train(tiny_policy, ROWS, Reward(), settings)
    tiny_policy.model.load_state_dict(start, strict=False)
    tiny_policy.sync()
    return folder


@pytest.fixture
def saved_copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


class Killed(BaseException):
    """As a kill -9 does, this ends a save with no clean-up at all."""


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


CHILD = """
import sys
from pathlib import Path
from colab_kit import checkpoint
folder, source = Path(sys.argv[1]), Path(sys.argv[2])
content = {name: (source / name).read_bytes() for name in checkpoint.FILES}
step = 100
while True:
    checkpoint.write(folder, step, content)
    print(step, flush=True)
    step += 1
"""


def test_kill_9_during_a_save_loses_none_that_was_finished(saved_copy):
    for pause in (0.013, 0.031):
        command = [sys.executable, "-c", CHILD, str(saved_copy), str(saved_copy / "checkpoint-3")]
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


# --- resuming: what changed, and what is there ----------------------------------------------------------


def test_resume_without_a_checkpoint_starts_from_the_beginning_and_says_so(policy, capsys):
    run = kit.train(policy, ROWS, Reward(), policy.settings.replace(max_steps=1), resume=True)
    assert len(run.metrics) == 1 and "starting from the beginning" in capsys.readouterr().out


def resume(policy, folder, rows=ROWS, **changes):
    settings = policy.settings.replace(
        output_dir=str(folder), max_steps=3, save_steps=1, save_total_limit=3, lr_scheduler_type="constant_with_warmup",
        warmup_steps=0, learning_rate=5e-3,
    )  # fmt: skip
    return kit.train(policy, rows, Reward(), settings.replace(**changes), resume=True)


def test_changed_settings_are_listed_and_take_effect(policy, saved_copy, capsys):
    run = resume(policy, saved_copy, learning_rate=1e-3, max_steps=4, temperature=0.9)
    said = capsys.readouterr().out
    for words in ("learning_rate 0.005 -> 0.001", "max_steps 3 -> 4", "temperature 1.0 -> 0.9"):
        assert words in said
    assert run.metrics[-1]["learning_rate"] == 1e-3 and len(run.metrics) == 4


@pytest.mark.parametrize(
    "changes",
    [{"seed": 7}, {"num_generations": 8}, {"per_device_train_batch_size": 4}, {"shuffle_dataset": False}],
    ids=str,
)
def test_changes_that_would_give_other_prompts_are_refused_with_a_way_out(policy, saved_copy, changes):
    with pytest.raises(ValueError, match=r"can't go on.*policy\.load_adapter"):
        resume(policy, saved_copy, **changes)


def test_another_dataset_is_refused(policy, saved_copy):
    with pytest.raises(ValueError, match="dataset gave 20 prompts"):
        resume(policy, saved_copy, rows=ROWS[:10])


def test_another_rank_is_refused(policy, saved_copy):
    kit.load(policy.settings.replace(lora_r=8))
    with pytest.raises(ValueError, match="lora_r was 4 and is 8"):
        resume(policy, saved_copy)


def test_the_same_step_size_cut_differently_goes_on(policy, saved_copy):
    run = resume(policy, saved_copy, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4)
    assert len(run.metrics) == 4


def test_a_run_that_is_finished_says_so_by_doing_nothing(policy, saved_copy):
    reward = Reward()
    settings = json.loads((saved_copy / "checkpoint-3" / "state.json").read_text())["settings"]
    assert settings["max_steps"] == 3
    run = resume(policy, saved_copy)
    assert run.status == "done" and len(run.metrics) == 3 and reward.calls == 0


def test_a_fresh_run_in_the_same_folder_sets_the_old_checkpoints_aside(policy, saved_copy, capsys):
    kit.train(policy, ROWS, Reward(), policy.settings.replace(output_dir=str(saved_copy), max_steps=1, save_steps=1))
    assert steps_of(saved_copy) == [1] and steps_of(saved_copy / "earlier-1") == [1, 2, 3]
    assert "moved to" in capsys.readouterr().out
    assert checkpoint.find(saved_copy / "earlier-1", "unused").step == 3


def test_the_engine_is_asleep_while_a_checkpoint_loads_and_then_samples_with_it(policy, saved_copy, monkeypatch):
    seen = []
    monkeypatch.setattr(
        checkpoint, "restore",
        lambda *a, real=checkpoint.restore: (real(*a), seen.append(policy.standby.is_awake)),
    )  # fmt: skip
    run = resume(policy, saved_copy, max_steps=4)
    assert seen == [False]
    # float32: the sampler's log-probabilities are the trainer's only if it has the trainer's adapter
    assert run.metrics[-1]["sampling/sampling_logp_difference/max"] < 1e-4


# --- cells that are run again ---------------------------------------------------------------------------


def test_load_twice_returns_the_same_policy(policy):
    assert kit.load(policy.settings.replace(learning_rate=1e-5)) is policy


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"max_completion_length": 900}, {"lora_r": 64}], ids=str)
def test_load_with_another_engines_settings_says_what_to_do(policy, changes):
    with pytest.raises(ValueError, match=r"kit\.unload\(\).*restart the runtime"):
        kit.load(policy.settings.replace(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"lora_r": 2}, {"lora_r": 8, "lora_alpha": 64}, {"lora_target_modules": ("q_proj", "down_proj")}],
    ids=str,
)
def test_another_rank_alpha_or_modules_take_effect_in_the_sampler(policy, changes, capsys):
    kit.train(policy, ROWS, Reward(), policy.settings.replace(max_steps=2))
    changed = kit.load(policy.settings.replace(warmup_steps=0, **changes))
    assert changed is policy and "fresh adapter" in capsys.readouterr().out
    base = policy.sample(ROWS[:4], temperature=0, use_adapter=False).completions
    assert policy.sample(ROWS[:4], temperature=0).completions == base  # untrained: the base model
    run = kit.train(policy, ROWS, Reward(), policy.settings.replace(max_steps=3))
    assert max(row["sampling/sampling_logp_difference/max"] for row in run.metrics) < 1e-4
    assert run.metrics[0]["grad_norm"] > 0


UNLOAD = """
import gc, sys, weakref
import colab_kit as kit
kit.enable_standby()
settings = kit.Settings(model_name_or_path=sys.argv[1], dtype="float32", lora_r=4, num_generations=2,
    per_device_train_batch_size=4, max_prompt_length=8, max_completion_length=8, max_steps=1, output_dir=sys.argv[2])
policy = kit.load(settings)
rows = [{"prompt": "w1 w2"}, {"prompt": "w3 w4"}]
before = policy.sample(rows, temperature=0).completions
run = kit.train(policy, rows, lambda completions, **_: [float(len(c)) for c in completions])
model = weakref.ref(policy.engine.model)
kit.unload()
assert model() is None, "the engine's model is still alive"
try:
    policy.sample(rows)
except RuntimeError as error:
    assert "unloaded" in str(error)
else:
    raise AssertionError
again = kit.load(settings)
assert again is not policy and again.sample(rows, temperature=0).completions == before
print("ok")
"""


def test_unload_lets_go_of_the_model_and_another_can_be_loaded(tiny_policy, tmp_path):
    command = [sys.executable, "-c", UNLOAD, tiny_policy.settings.model_name_or_path, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLAB_KIT_DASHBOARD": "off"})
    assert child.stdout.endswith("ok\n"), child.stdout + child.stderr


# --- exports --------------------------------------------------------------------------------------------


@pytest.fixture
def trained(policy):
    kit.train(policy, ROWS, Reward(), policy.settings.replace(learning_rate=2e-2, lr_scheduler_type="constant"))
    return policy


def sampled(policy, rows=ROWS[:4], **more):
    """The policy's greedy token ids."""
    ids = kit.data.encode_prompts([row["prompt"] for row in rows], policy.tokenizer)
    with policy.standby.awake():
        groups = policy.engine.generate(ids, temperature=0, **({"lora_request": policy.slot.request} | more))
    return [group[0].token_ids for group in groups]


def assert_same_greedy_tokens(model, policy, expected, tie=0.0, rows=ROWS[:4]):
    """Each token is the likeliest after those before it, except where rounding decides between logits within `tie`."""
    compared = 0
    for row, tokens in zip(rows, expected, strict=True):
        ids = torch.tensor([kit.data.encode_prompts([row["prompt"]], policy.tokenizer)[0] + tokens])
        with torch.no_grad():
            scores = model(ids).logits[0, -len(tokens) - 1 : -1].float()
        for score, token in zip(scores, tokens, strict=True):
            best, second = score.topk(2).values
            if best - second > tie:
                assert score.argmax() == token
                compared += 1
    assert compared > 0.5 * sum(map(len, expected))


def logits(model, rows=ROWS[:4]):
    ids = torch.tensor([[2 + (7 * i + 3 * j) % 500 for j in range(24)] for i in range(len(rows))])
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_a_saved_adapter_gives_the_same_tokens_in_peft_and_transformers(trained, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = sampled(trained)
    assert expected != sampled(trained, lora_request=None)
    base = AutoModelForCausalLM.from_pretrained(trained.settings.model_name_or_path, dtype=torch.float32)
    for module in base.modules():
        if hasattr(module, "compute_dtype"):
            # The checkpoint says bfloat16, and so does bitsandbytes' kernel for some CPUs; the policy runs in float32.
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32
            module.support_avx512bf16_for_cpu = False
    model = PeftModel.from_pretrained(base, trained.save(tmp_path / "adapter")).eval()
    assert_same_greedy_tokens(model, trained, expected, tie=1e-4)
    trained.model.get_base_model().set_attn_implementation("sdpa")
    assert kl(logits(trained.model), logits(model)) < 1e-6


def test_a_saved_adapter_can_be_gone_on_from(trained, tmp_path):
    expected, values = trained.sample(ROWS[:4], temperature=0).completions, adapter(trained)
    trained.save(tmp_path / "adapter")
    with torch.no_grad():
        for parameter in trained.model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    trained.sync()
    trained.load_adapter(tmp_path / "adapter")
    assert same(adapter(trained), values)
    assert trained.sample(ROWS[:4], temperature=0).completions == expected


def test_an_adapter_that_does_not_fit_is_refused_whole(trained, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, values = trained.save(tmp_path / "adapter"), adapter(trained)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = sorted(tensors)[-1]
    save_file(tensors | {key: torch.zeros(3, 3)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="another model or rank"):
        trained.load_adapter(folder)
    save_file({name: value for name, value in tensors.items() if name != key}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="other tensors"):
        trained.load_adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        trained.load_adapter(folder)
    assert same(adapter(trained), values)


@pytest.mark.parametrize("dtype, most", [("float32", 1e-6), (None, 1e-3)])
def test_a_merged_model_gives_the_same_tokens_in_plain_transformers(trained, tmp_path, dtype, most):
    from transformers import AutoModelForCausalLM

    expected = sampled(trained)
    folder = trained.merge(tmp_path / "merged", dtype)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert_same_greedy_tokens(model, trained, expected, tie=1e-4 if dtype else 0.02)
    trained.model.get_base_model().set_attn_implementation("sdpa")
    assert kl(logits(trained.model), logits(model)) < most


def test_the_hub_gets_the_files_and_nobody_sees_the_token(trained, monkeypatch, capsys):
    calls = []

    class Hub:
        def __init__(self, token):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            assert options["private"]
            return f"https://huggingface.co/{repo_id}"

        def upload_folder(self, repo_id, folder_path):
            calls.append({path.name for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    address = trained.push_to_hub("me/mine", token="hf_secret")
    trained.push_to_hub("me/mine", token="hf_secret", merged=True)
    out = capsys.readouterr()
    assert address.endswith("me/mine") and "hf_secret" not in out.out + out.err
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= calls[1]
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= calls[3]
