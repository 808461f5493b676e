"""Fixtures over a real engine. One engine lives in a process; what needs another one runs in a process of its own."""

import json
import os
import subprocess
import sys

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
    max_prompt_length=112,  # with the completion one block of the CPU cache, so that all fit at once
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
    return kit.load(settings)


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
