"""A run from the user's own entry points: the sampler follows the trainer, and wrong input is refused early."""

import math

import pytest
import torch

import colab_kit as kit
from colab_kit.rewards import RewardError
from colab_kit.samples import Comparison, Samples


def even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def test_after_every_step_the_sampler_is_the_trained_policy(tiny_policy, tiny_rows):
    run = kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=5))
    differences = [step["sampling/sampling_logp_difference/max"] for step in run.metrics]
    assert all(difference < 1e-4 for difference in differences), differences


def test_without_the_slot_copy_it_is_not(tiny_policy, tiny_rows, monkeypatch):
    """The check above can fail: leave the copy out, and it does."""
    monkeypatch.setattr(tiny_policy, "sync", lambda: None)
    settings = tiny_policy.settings.replace(max_steps=4, learning_rate=0.02)
    run = kit.train(tiny_policy, tiny_rows, even_tokens, settings)
    assert run.metrics[-1]["sampling/sampling_logp_difference/max"] > 1e-3
    monkeypatch.undo()
    run = kit.train(tiny_policy, tiny_rows, even_tokens, settings)
    assert run.metrics[-1]["sampling/sampling_logp_difference/max"] < 1e-4


def test_the_result_does_not_depend_on_micro_batches(tiny_policy, tiny_rows):
    """The same step cut into one, several, and single-sequence micro-batches gives the same gradient."""
    from colab_kit.trainer import Trainer

    def gradient(max_tokens, loss_type):
        settings = tiny_policy.settings.replace(max_tokens_per_micro_batch=max_tokens, loss_type=loss_type)
        trainer = Trainer(tiny_policy, tiny_rows, even_tokens, settings)
        found = []
        trainer.optimizer_step = lambda: found.append([p.grad.clone() for p in trainer.parameters]) or {}
        trainer.dashboard = kit.dashboard.Dashboard(trainer.report, mode="off")
        trainer.step(0)
        trainer.optimizer.zero_grad()
        return torch.cat([g.flatten() for g in found[0]])

    for loss_type in ("dapo", "grpo", "dr_grpo"):
        whole = gradient(10_000, loss_type)
        for max_tokens in (1, 40):
            parts = gradient(max_tokens, loss_type)
            assert (parts - whole).norm() <= 1e-6 * whole.norm()


def test_checkpointed_and_tiled_layers_give_the_plain_gradient(tiny_policy):
    from colab_kit.long_context import Devices, hidden_states, prepare_model

    prepare_model(tiny_policy.model.get_base_model())
    backbone = tiny_policy.model.get_base_model().model
    parameters = [p for p in tiny_policy.model.parameters() if p.requires_grad]
    sequences = [[0, *range(5, 30)], [0, *range(40, 51)]]

    def gradient(devices):
        states = hidden_states(backbone, sequences, devices)
        states.pow(2).sum().backward()
        found = torch.cat([p.grad.flatten() for p in parameters])
        for p in parameters:
            p.grad = None
        return states.detach(), found

    plain_states, plain = gradient(Devices())
    for devices in (Devices(True), Devices(True, False, 7), Devices(True, False, 7, kept_layers=1)):
        states, grads = gradient(devices)
        assert torch.allclose(states, plain_states, atol=1e-6)
        assert (grads - plain).norm() <= 1e-6 * plain.norm()


def test_the_adapters_forward_and_gradients_are_pefts_own(tiny_policy):
    from colab_kit.adapter import lora_layers

    for name, layer in lora_layers(tiny_policy.model).items():
        x = torch.randn(2, 7, layer.in_features, requires_grad=True)
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        found = []
        for forward in (layer.forward, lambda x, layer=layer: type(layer).forward(layer, x)):
            out = forward(x)
            weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
            found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *weights])])
        torch.nn.init.zeros_(layer.lora_B["default"].weight)
        for mine, pefts in zip(*found, strict=True):
            assert (mine - pefts).norm() <= 1e-6 * pefts.norm(), name


def test_packed_sequences_do_not_see_each_other(tiny_policy):
    from colab_kit.long_context import Devices, hidden_states, prepare_model

    prepare_model(tiny_policy.model.get_base_model())
    backbone = tiny_policy.model.get_base_model().model
    first, second = [0, *range(5, 30)], [0, *range(40, 51)]
    with torch.no_grad():
        packed = hidden_states(backbone, [first, second], Devices())
        alone = torch.cat([hidden_states(backbone, [first], Devices()), hidden_states(backbone, [second], Devices())])
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2},
        {"beta": 0.04},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"mask_truncated_completions": True},
        {"vllm_importance_sampling_correction": False},
        {"scale_rewards": "none", "loss_type": "dr_grpo"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_every_kind_of_run_gives_finite_figures(changes, tiny_policy, tiny_rows):
    run = kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=2, **changes))
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in run.metrics)
    assert ("kl" in run.metrics[0]) == ("beta" in changes)
    if "mask_truncated_completions" in changes:  # nothing of a random model ends by itself: nothing is learned
        assert run.metrics[0]["completions/clipped_ratio"] > 0.9


def test_a_cut_distribution_is_said_once_with_its_bias(tiny_policy, tiny_rows, capsys):
    kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=2, top_p=0.8))
    assert capsys.readouterr().out.count("top_p=0.8: vLLM samples from a cut distribution") == 1


def test_an_infinite_gradient_skips_the_step_and_training_goes_on(tiny_policy, tiny_rows, capsys):
    """As float16 does now and then."""
    from colab_kit.trainer import Trainer

    trainer = Trainer(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=2))
    hook = trainer.parameters[0].register_hook(lambda grad: grad * float("inf"))
    before = [p.detach().clone() for p in trainer.parameters]
    run = trainer.run()
    hook.remove()
    assert [step["skipped_steps"] for step in run.metrics] == [1.0, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    assert "this optimizer step is skipped" in capsys.readouterr().out
    assert kit.train(tiny_policy, tiny_rows, even_tokens).metrics[0]["skipped_steps"] == 0.0


def test_sampling_twice_with_one_seed_gives_the_same(tiny_policy, tiny_rows):
    assert tiny_policy.sample(tiny_rows[:3]).completions == tiny_policy.sample(tiny_rows[:3]).completions
    twice = tiny_policy.sample([tiny_rows[0], tiny_rows[0]], n=2)
    assert twice[0] != twice[1], "a prompt that occurs twice must not get the same completions twice"


def test_texts_are_what_vllm_itself_makes_of_the_tokens(tiny_policy, tiny_rows):
    prompts = tiny_policy.tokenizer([row["prompt"] for row in tiny_rows[:4]])["input_ids"]

    def texts(**options):
        with tiny_policy.standby.awake():
            groups = tiny_policy.engine.generate(prompts, n=4, seed=1, max_tokens=12, **options)
        return [(completion.text, completion.finish_reason) for group in groups for completion in group]

    mine, theirs = texts(), texts(detokenize=True)
    assert mine == [(text.removeprefix(" "), reason) for text, reason in theirs]  # as TRL: the prompt is not decoded
    words = tiny_policy.sample(tiny_rows[:1], temperature=0)[0][0].split()
    stopped = tiny_policy.sample(tiny_rows[:1], temperature=0, stop=[words[3]])[0][0]
    assert stopped.split() == words[: words.index(words[3])]


def test_a_sample_does_not_depend_on_what_was_sampled_before(tiny_policy, tiny_rows, monkeypatch):
    """On a GPU half precision rounds otherwise where a prompt's keys come from the cache: greedy answers differed."""
    scheduler, read = tiny_policy.engine.core.scheduler, []
    add = scheduler.add_request
    monkeypatch.setattr(scheduler, "add_request", lambda request: (add(request), read.append(request)))
    tiny_policy.sample(tiny_rows[:2], temperature=0)
    kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=1))
    assert [request.skip_reading_prefix_cache for request in read[:2]] == [True, True]
    assert not any(request.skip_reading_prefix_cache for request in read[2:]), "training reads what the group shares"


def test_what_a_reward_gives_to_log_extra_stands_beside_its_completion(tiny_policy, tiny_rows):
    def short(completion_ids, log_extra, **_):
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return [-len(ids) for ids in completion_ids]

    run = kit.train(tiny_policy, tiny_rows, short, tiny_policy.settings.replace(max_steps=1, log_completions=True))
    rows = run.report.completions["rows"]
    assert rows and all(row["extra"]["tokens"] == str(-int(row["rewards"]["short"])) for row in rows)


def test_callbacks_are_transformers_own(tiny_policy, tiny_rows):
    from transformers import TrainerCallback

    class StopAfterTwo(TrainerCallback):
        seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append((state.global_step, logs["reward"]))

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2
            return control

    run = kit.train(
        tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=5), callbacks=[StopAfterTwo()]
    )
    assert len(run.metrics) == 2
    assert [step for step, _ in StopAfterTwo.seen] == [1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_8_bit_optimizer_waits_for_what_another_stream_has_not_done_yet():
    """vLLM makes a stream of its own the current one, bitsandbytes launches on the default one."""
    from colab_kit.optimizer import make_optimizer

    with torch.cuda.stream(torch.cuda.Stream()):
        p = torch.nn.Parameter(torch.ones(8192, device="cuda"))
        optimizer = make_optimizer([p], kit.Settings(learning_rate=0.1, optim="adamw_8bit"), p.device)
        for step in (1, 2):
            torch.cuda._sleep(200_000_000)
            p.grad = torch.full_like(p, 0.5)
            optimizer.step()
            assert torch.allclose(p.detach(), torch.full_like(p, 1 - 0.1 * step), atol=0.01)


def test_a_sampler_that_gives_nan_ends_the_run_before_anything_is_trained_on_it(policy, tiny_rows):
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    for p in trained:
        p.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="log-probabilities are not finite, so is the adapter"):
        kit.train(policy, tiny_rows, even_tokens)
    assert not policy.standby.is_awake


# --- wrong input: refused before the first step -----------------------------------------------------------


def raising(completions, **_):
    raise KeyError("no such thing")


def short_list(completions, **_):
    return [1.0]


def not_a_number(completions, **_):
    return [1.0, float("nan")] + [0.0] * (len(completions) - 2)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raising, "'raising' raised KeyError"),
        (short_list, r"'short_list' returned 1 rewards for 8 completions \(row 1"),
        (not_a_number, "'not_a_number' returned nan for row 1"),
    ],
)
def test_a_wrong_reward_is_named_with_its_row_and_the_engine_sleeps(reward, message, tiny_policy, tiny_rows):
    with pytest.raises(RewardError, match=message):
        kit.train(tiny_policy, tiny_rows, reward)
    assert not tiny_policy.standby.is_awake
    assert kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(max_steps=1)).metrics


def test_a_dataset_without_prompts_is_refused_with_its_columns(tiny_policy):
    with pytest.raises(ValueError, match="needs a column 'prompt'; row 0 has question"):
        kit.train(tiny_policy, [{"question": "1 + 1?"}], even_tokens)


def test_settings_that_only_a_new_load_could_honour_are_refused(tiny_policy, tiny_rows):
    with pytest.raises(ValueError, match="lora_r=16"):
        kit.train(tiny_policy, tiny_rows, even_tokens, tiny_policy.settings.replace(lora_r=16))


def test_a_model_path_that_does_not_exist_is_refused_at_once(in_fresh_process):
    code = "import colab_kit as kit; kit.load(kit.Settings(model_name_or_path='./no/such/model'))"
    done = in_fresh_process(code, check=False, timeout=60)
    assert "FileNotFoundError: model_name_or_path='./no/such/model': there is no such folder" in done.stderr


def test_one_generation_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="the group's standard deviation is 0"):
        kit.Settings(num_generations=1)


def test_greedy_sampling_of_several_is_refused(tiny_policy, tiny_rows):
    with pytest.raises(ValueError, match="n must be 1"):
        tiny_policy.sample(tiny_rows[:1], n=2, temperature=0)


# --- samples ----------------------------------------------------------------------------------------------


def test_a_slice_of_samples_is_a_table_of_those_rows():
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in ("one?", "two?", "three?")]
    before = Samples(rows, [["1"], ["2"], ["3"]], {"temperature": 0})
    both = Comparison(before, Samples(rows, [["I"], ["II"], ["III"]], {"temperature": 0}))
    assert before[:2].columns == {"prompt": ["one?", "two?"], "completion": ["1", "2"]}
    assert before[:2].sampling == before.sampling and before[1] == ["2"]
    assert both[1:].columns == {"prompt": ["two?", "three?"], "before": ["2", "3"], "after": ["II", "III"]}
    assert "<td" in both[:1]._repr_html_() and both[2] == ["III"]
