"""One real engine for all tests of a process: tiny random weights, float32, so that results are exact."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the cores from each other


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """A loaded policy of the `tiny_llama` shape, 4-bit, in float32 (8 completions a step, of 16 tokens at most)."""
    import colab_kit as kit
    from colab_kit.shapes import write_checkpoint

    kit.enable_standby()
    folder = write_checkpoint("tiny_llama", tmp_path_factory.mktemp("tiny_llama"))
    settings = kit.Settings(
        model_name_or_path=str(folder),
        dtype="float32",
        lora_r=4,
        lora_alpha=8,
        num_generations=4,
        per_device_train_batch_size=8,
        max_prompt_length=112,  # with the completion one block of the CPU's KV cache, so that all fit at once
        max_completion_length=16,
        learning_rate=1e-2,
        max_steps=5,
        output_dir=str(tmp_path_factory.mktemp("outputs")),
    )
    return kit.load(settings)
