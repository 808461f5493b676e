"""A run that goes on equals one that was never stopped; what can't go on is refused with a way out."""

from __future__ import annotations

import json

import pytest
import torch
from small_runs import ROWS, Reward, adapter, figures, is_idle, press_stop, resume, same, steps_of

import colab_kit as kit
from colab_kit import checkpoint
from colab_kit.optimizer import load_optimizer_state, make_optimizer, make_scheduler, optimizer_state, set_schedule


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


def test_resume_without_a_checkpoint_starts_from_the_beginning_and_says_so(policy, capsys):
    run = kit.train(policy, ROWS, Reward(), policy.settings.replace(max_steps=1), resume=True)
    assert len(run.metrics) == 1 and "starting from the beginning" in capsys.readouterr().out


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
