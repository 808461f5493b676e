"""The memory plan: what it chooses, and what it refuses before anything is loaded."""

from types import SimpleNamespace

import pytest

import colab_kit as kit
from colab_kit.planning import GIB, make_plan, sizes
from colab_kit.shapes import SHAPES

LLAMA, QWEN_32B = SimpleNamespace(**SHAPES["llama31_8b"]), SimpleNamespace(**SHAPES["qwen3_32b"])
T4, A100 = (7, 5), (8, 0)


def on_card(settings, config, gib, capability):
    return make_plan(settings, config, int(gib * GIB), int(gib * GIB), capability)


def test_the_t4_preset_fits_a_t4():
    plan = on_card(kit.presets.LLAMA31_8B_T4, LLAMA, 14.3, T4)
    assert plan.sizes.weights / GIB == pytest.approx(5.61, abs=0.01)
    assert plan.sizes.idle + plan.kv_cache_bytes < 14.3 * GIB
    assert plan.sizes.idle + plan.sizes.training < 14.3 * GIB


def test_the_a100_preset_fits_forty_gigabytes():
    plan = on_card(kit.presets.QWEN3_32B_A100, QWEN_32B, 39.2, A100)
    assert plan.sizes.idle + max(plan.kv_cache_bytes, plan.sizes.training) < 39.2 * GIB


def test_the_kv_cache_holds_a_whole_step_where_there_is_room():
    settings = kit.presets.LLAMA31_8B_T4
    plan = on_card(settings, LLAMA, 14.3, T4)
    tokens = plan.kv_cache_bytes / plan.sizes.kv_per_token
    assert settings.completions_per_step * settings.max_model_length <= tokens
    assert "room for one step's completions" in plan.reasons[-1]


def test_a_small_card_generates_some_completions_at_a_time_and_says_so():
    settings = kit.presets.LLAMA31_8B_T4.replace(max_completion_length=8192, num_generations=16,
                                                 per_device_train_batch_size=16)  # fmt: skip
    plan = on_card(settings, LLAMA, 14.3, T4)
    assert "of 16 completions at full length at a time" in plan.reasons[-1]
    assert plan.sizes.idle + plan.kv_cache_bytes < 14.3 * GIB


def test_a_sequence_that_does_not_fit_is_refused_with_the_longest_that_does():
    settings = kit.presets.LLAMA31_8B_T4.replace(max_completion_length=100_000)
    with pytest.raises(MemoryError, match=r"the longest sequence is [\d,]+ tokens: lower max_completion_length"):
        on_card(settings, LLAMA, 14.3, T4)


def test_a_model_that_does_not_fit_is_refused_with_a_way_out():
    with pytest.raises(MemoryError, match="needs about 22.5 GiB before the KV cache.*choose a smaller model"):
        on_card(kit.presets.QWEN3_32B_A100, QWEN_32B, 14.3, A100)


def test_more_tokens_than_the_models_window_are_refused():
    with pytest.raises(ValueError, match="the model's window has 40960"):
        on_card(kit.presets.QWEN3_32B_A100.replace(max_completion_length=60_000), QWEN_32B, 200, A100)


def test_bfloat16_on_a_t4_is_refused_and_auto_takes_float16():
    settings = kit.presets.LLAMA31_8B_T4
    with pytest.raises(ValueError, match="has no bfloat16"):
        on_card(settings.replace(dtype="bfloat16"), LLAMA, 14.3, T4)
    assert on_card(settings.replace(dtype="auto"), LLAMA, 14.3, T4).dtype == "float16"


def test_a_utilization_that_was_set_is_left_to_vllm_and_said():
    plan = on_card(kit.presets.LLAMA31_8B_T4.replace(vllm_gpu_memory_utilization=0.7), LLAMA, 14.3, T4)
    assert plan.kv_cache_bytes is None
    assert "vllm_gpu_memory_utilization=0.7, as set" in plan.reasons[-1]


@pytest.mark.parametrize(("tokens", "measured"), [(1024, 0.40), (4096, 1.17), (16384, 2.30), (65536, 9.09)])
def test_activations_agree_with_the_peaks_measured_on_an_h200(tokens, measured):
    """GiB above idle by torch's count, without gradients: README, Llama-3.1-8B, short completions."""
    settings = kit.Settings(lora_r=32, logprob_chunk_size=1)
    estimate = sizes(LLAMA, settings, 2, tokens).activations / GIB
    assert estimate == pytest.approx(measured, rel=0.12)


def test_the_table_shows_the_three_ways():
    table = kit.plan(kit.presets.QUICKSTART).columns
    assert list(table) == ["GiB, estimated", "two engines", "shared weights", "shared + Standby"]
    needed = [float(table[way][-1]) for way in list(table)[1:]]
    assert needed == sorted(needed, reverse=True)
