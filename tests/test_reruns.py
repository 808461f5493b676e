"""Cells that are run again: load twice, load with other settings, unload."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from small_runs import ROWS, Reward

import colab_kit as kit


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
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    # The plan follows: masters and vLLM's slot, both float32 here.
    assert policy.plan.sizes.lora == 4 * trained + 4 * sum(x.numel() for x in policy.engine.slot_matrices)


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
