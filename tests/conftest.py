"""Fixtures over a real engine. One engine lives in a process; what needs another one runs in a process of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("UNSLOTH_VLLM_STANDBY", "1")
os.environ["COLAB_KIT_CI"] = "1"  # the notebooks' smaller numbers; kernels inherit it

import pytest  # noqa: E402

import colab_kit as kit  # noqa: E402

TINY = kit.Settings(
    model_name_or_path="tiny_llama",
    dtype="float32",
    lora_r=4,
    lora_alpha=8,
    num_generations=4,
    per_device_train_batch_size=8,
    max_prompt_length=24,
    max_completion_length=16,
    learning_rate=1e-2,
    max_steps=5,
)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A function: the folder of a random checkpoint of a small shape, as the hub has it."""
    from colab_kit.shapes import write_checkpoint

    def write(name: str, load_in_4bit: bool = True) -> str:
        folder = tmp_path_factory.getbasetemp() / f"{name}-{load_in_4bit}"
        if not folder.exists():
            write_checkpoint(name, folder, load_in_4bit=load_in_4bit)
        return str(folder)

    return write


@pytest.fixture(scope="session")
def tiny_policy(tiny_checkpoint, tmp_path_factory):
    """A policy over a random two-layer Llama, pre-quantized, in float32, with the real engine."""
    kit.enable_standby()
    settings = TINY.replace(
        model_name_or_path=tiny_checkpoint("tiny_llama"), output_dir=str(tmp_path_factory.mktemp("outputs"))
    )
    from small_runs import adapter

    policy = kit.load(settings)
    policy.untrained = adapter(policy)
    return policy


@pytest.fixture(scope="session")
def tiny_rows():
    return [{"prompt": f"w{i} w{i + 1} w{i + 2}", "target": i} for i in range(10, 26)]


@pytest.fixture
def in_fresh_process():
    """A function: run Python code in a process of its own, and read the JSON of its last line."""

    def run(code: str, timeout: float = 240, check: bool = True, **environment: str):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=os.environ | environment
        )
        if not check:
            return done
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture
def policy(tiny_policy, tmp_path, monkeypatch):
    """The tiny policy with a fresh adapter and settings of its own: linear schedule, warm-up, dropout."""
    monkeypatch.setenv("COLAB_KIT_DASHBOARD", "off")
    from small_runs import STEPS

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before = tiny_policy.settings
    fresh = before.replace(
        output_dir=str(tmp_path / "run"), max_steps=STEPS, lr_scheduler_type="linear", warmup_steps=2
    )
    tiny_policy.settings = fresh
    forget_training(tiny_policy)
    yield tiny_policy
    signal.signal(signal.SIGINT, handler)
    kit.load(before)
    forget_training(tiny_policy)


def forget_training(policy):
    policy.model.load_state_dict(policy.untrained, strict=False)
    policy.sync()


@pytest.fixture(scope="session")
def uninterrupted_run(tiny_policy, tmp_path_factory):
    """What the run gives when nothing happens: figures, prompts, adapter."""
    from small_runs import ROWS, STEPS, Reward, adapter, figures, same

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAB_KIT_DASHBOARD", "off")
        forget_training(tiny_policy)
        reward = Reward()
        settings = tiny_policy.settings.replace(
            output_dir=str(tmp_path_factory.mktemp("whole")),
            max_steps=STEPS,
            lr_scheduler_type="linear",
            warmup_steps=2,
        )
        run = kit.train(tiny_policy, ROWS, reward, settings)
        end = adapter(tiny_policy)
        forget_training(tiny_policy)
    assert not same(tiny_policy.untrained, end)
    return figures(run), reward.prompts, end


@pytest.fixture(scope="session")
def saved(tiny_policy, tmp_path_factory):
    """A folder with checkpoints of steps 1 to 3."""
    from small_runs import ROWS, Reward

    folder = tmp_path_factory.mktemp("saved")
    forget_training(tiny_policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLAB_KIT_DASHBOARD", "off")
        settings = tiny_policy.settings.replace(
            output_dir=str(folder), max_steps=3, save_steps=1, save_total_limit=3, learning_rate=5e-3
        )
        kit.train(tiny_policy, ROWS, Reward(), settings)
    forget_training(tiny_policy)
    return folder


@pytest.fixture
def saved_copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))
