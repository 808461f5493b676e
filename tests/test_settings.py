"""A wrong setting fails when it is made, with its name and what would be accepted."""

import pytest

from colab_kit.presets import LOSS_TYPES, Settings


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"temperature": 0.0}, ["temperature must be above 0", "got 0.0"]),
        ({"temperature": -1.0}, ["temperature must be above 0"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"num_generations": 1}, ["num_generations must be at least 2", "standard deviation is 0"]),
        ({"per_device_train_batch_size": 9}, ["9 completions", "num_generations=8"]),
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}, ["9 completions", "num_generations=8"]),
        ({"loss_type": "dapoo"}, ["loss_type='dapoo'", "did you mean 'dapo'?", *LOSS_TYPES]),
        ({"loss_type": "drgrpo"}, ["did you mean 'dr_grpo'?"]),
        ({"scale_rewards": "groups"}, ["scale_rewards", "did you mean 'group'?", "batch", "none"]),
        ({"importance_sampling_level": "seq"}, ["importance_sampling_level", "token, sequence"]),
        ({"multi_objective_aggregation": "sum"}, ["multi_objective_aggregation", "normalize_then_sum"]),
        ({"vllm_importance_sampling_mode": "token"}, ["vllm_importance_sampling_mode", "sequence_mask"]),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, ["epsilon_high=0.2", "epsilon=0.3"]),
        ({"epsilon": 0.0}, ["epsilon must be above 0"]),
        ({"delta": 1.1}, ["delta=1.1", "1 + epsilon_high"]),
        ({"beta": -0.1}, ["beta must be at least 0"]),
        ({"top_p": 1.5}, ["top_p", "at most 1"]),
        ({"lora_r": 513}, ["lora_r must be at most 512"]),
        ({"lora_target_modules": ("q_proj", "lm_head")}, ["lora_target_modules='lm_head'", "q_proj", "down_proj"]),
        ({"num_iterations": 0}, ["num_iterations must be at least 1"]),
        (
            {"vllm_importance_sampling_clip_min": 4.0, "vllm_importance_sampling_clip_max": 3.0},
            ["vllm_importance_sampling_clip_min=4.0", "vllm_importance_sampling_clip_max=3.0"],
        ),
        ({"vllm_max_model_length": 200, "max_completion_length": 256}, ["vllm_max_model_length=200", "256"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_accepted(changes, words):
    for make in (lambda: Settings(**changes), lambda: Settings().replace(**changes)):
        with pytest.raises(ValueError) as error:
            make()
        for word in words:
            assert word in str(error.value)


def test_an_unknown_setting_names_the_nearest_one():
    with pytest.raises(TypeError, match="did you mean 'num_generations'"):
        Settings().replace(num_generation=4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_can_be_chosen(loss_type):
    assert Settings(loss_type=loss_type, epsilon_high=0.28, delta=2.0, beta=0.04).loss_type == loss_type
