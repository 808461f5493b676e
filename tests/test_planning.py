"""The memory plan: what it chooses, and what it refuses before anything is loaded."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import colab_kit as kit
from colab_kit import benchmark
from colab_kit.measure import at_length, settings_for
from colab_kit.planning import make_plan, sizes
from colab_kit.shapes import SHAPES
from colab_kit.training_pass import (
    GIB,
    Devices,
    activations,
    choose_devices,
    keep_layers,
    layer_activations,
    micro_batch_tokens,
)

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
    assert "of 32 completions at full length at a time" in plan.reasons[-1]
    assert plan.sizes.idle + plan.kv_cache_bytes < 14.3 * GIB


def test_a_sequence_that_does_not_fit_is_refused_with_the_longest_that_does():
    settings = kit.presets.LLAMA31_8B_T4.replace(max_completion_length=100_000)
    with pytest.raises(MemoryError, match=r"the longest sequence is [\d,]+ tokens: lower max_completion_length"):
        on_card(settings, LLAMA, 14.3, T4)


def test_a_model_that_does_not_fit_is_refused_with_a_way_out():
    with pytest.raises(MemoryError, match="needs about 23.1 GiB before the KV cache.*choose a smaller model"):
        on_card(kit.presets.QWEN3_32B_A100, QWEN_32B, 14.3, A100)


@pytest.mark.parametrize("changes", [{}, {"dtype": "auto"}])
def test_a_preset_that_needs_a_gpu_is_refused_without_one_by_name(changes):
    with pytest.raises(ValueError, match="needs a GPU and none is here: choose a runtime with one.*QUICKSTART"):
        make_plan(kit.presets.LLAMA31_8B_T4.replace(**changes), LLAMA, 20 * GIB, 24 * GIB, None)


def test_a_model_that_system_memory_has_no_room_for_is_refused_on_a_cpu():
    with pytest.raises(MemoryError, match="of system memory and 12.0 are free"):
        make_plan(kit.Settings(), QWEN_32B, 12 * GIB, 24 * GIB, None)


def test_more_tokens_than_the_models_window_are_refused():
    with pytest.raises(ValueError, match="the model's window has 40960"):
        on_card(kit.presets.QWEN3_32B_A100.replace(max_completion_length=60_000), QWEN_32B, 200, A100)


def test_bfloat16_on_a_t4_is_refused_and_auto_takes_float16():
    settings = kit.presets.LLAMA31_8B_T4
    with pytest.raises(ValueError, match="has no bfloat16"):
        on_card(settings.replace(dtype="bfloat16"), LLAMA, 14.3, T4)
    assert on_card(settings.replace(dtype="auto"), LLAMA, 14.3, T4).dtype == "float16"


def test_a_utilization_that_was_set_is_what_the_process_may_take_while_it_generates():
    plan = on_card(kit.presets.LLAMA31_8B_T4.replace(vllm_gpu_memory_utilization=0.9), LLAMA, 14.3, T4)
    assert plan.kv_cache_bytes + plan.sizes.idle + plan.sizes.prefill == pytest.approx(0.9 * 14.3 * GIB)
    assert "vllm_gpu_memory_utilization=0.9, as set" in plan.reasons[-1]


def test_a_utilization_beyond_what_is_free_leaves_a_margin_and_says_so():
    settings = kit.presets.LLAMA31_8B_T4.replace(vllm_gpu_memory_utilization=0.9)
    plan = make_plan(settings, LLAMA, int(12 * GIB), int(14.3 * GIB), T4)
    assert plan.kv_cache_bytes + plan.sizes.idle + plan.sizes.prefill < 11.9 * GIB
    assert "vllm_gpu_memory_utilization=0.9 asks for 12.87 in all and only 12.00 are free" in plan.reasons[-1]


def test_a_utilization_that_leaves_no_room_is_refused_by_name():
    with pytest.raises(MemoryError, match="or raise vllm_gpu_memory_utilization=0.5"):
        on_card(kit.presets.LLAMA31_8B_T4.replace(vllm_gpu_memory_utilization=0.5), LLAMA, 14.3, T4)


def test_the_fastest_devices_that_fit_with_a_tenth_to_spare_are_chosen():
    settings, chosen = kit.Settings(lora_r=32), []
    for tokens, room in ((8192, 5), (16_384, 7.5), (16_384, 5), (16_384, 2.5)):
        devices, needed = choose_devices(LLAMA, settings, 2, tokens, int(room * GIB), 10**12, False)
        assert needed <= room * GIB / 1.1
        chosen.append((devices.activation_offloading, devices.mlp_tile_tokens))
    assert chosen == [(False, None), (False, 4096), (True, 4096), (True, 1024)]


@given(tokens=st.sampled_from([512, 1024, 4096, 8192]), spare=st.integers(1, 120), expand=st.booleans())
def test_only_the_layers_that_the_spare_memory_cannot_keep_whole_are_recomputed(tokens, spare, expand):
    settings, devices = kit.Settings(lora_r=32), Devices(True, expand_kv=expand)
    needed = activations(LLAMA, settings, 2, tokens, devices, 0)
    kept, bytes_kept = keep_layers(LLAMA, 2, tokens, devices, needed, spare * GIB)
    assert bytes_kept == activations(LLAMA, settings, 2, tokens, kept, 0)
    one_more = bytes_kept + layer_activations(LLAMA, 2, tokens, devices)
    if kept.gradient_checkpointing:
        assert one_more > spare * GIB / 1.1
    if kept != devices:
        assert bytes_kept <= spare * GIB / 1.1


def test_a_t4_recomputes_a_third_of_the_layers_at_the_presets_length_and_none_at_1024_tokens():
    settings, room = kit.presets.LLAMA31_8B_T4, int(6.9 * GIB)
    for length, recomputed in ((1536, 11), (1024, 0)):
        changed = settings.replace(max_completion_length=length - 512)
        tokens, _ = micro_batch_tokens(LLAMA, changed, 2, room, True, room)
        assert tokens == length  # small micro-batches keep more
        chosen = choose_devices(LLAMA, changed, 2, tokens, room, 0, True)
        devices, _ = keep_layers(LLAMA, 2, tokens, *chosen, room)
        assert (32 - devices.kept_layers if devices.gradient_checkpointing else 0) == recomputed


def test_recomputing_nothing_can_be_asked_for_and_is_refused_where_it_does_not_fit():
    settings = kit.Settings(gradient_checkpointing=False)
    devices, _ = choose_devices(LLAMA, settings, 2, 1024, 10 * GIB, 0, False)
    assert devices == Devices()
    with pytest.raises(MemoryError, match="the longest sequence is about 1,"):
        choose_devices(LLAMA, settings, 2, 4096, 10 * GIB, 0, False)


def test_devices_that_were_set_stay_set():
    settings = kit.Settings(activation_offloading=True, mlp_tile_tokens=2048)
    devices, _ = choose_devices(LLAMA, settings, 2, 1024, 100 * GIB, 10**12, False)
    assert (devices.activation_offloading, devices.mlp_tile_tokens) == (True, 2048)


def test_hidden_states_that_system_memory_has_no_room_for_are_counted_on_the_card():
    devices = Devices(True, True, 4096)
    states = 32 * 32_768 * 4096 * 2
    with_room, without = (activations(LLAMA, kit.Settings(), 2, 32_768, devices, host) for host in (states, 0))
    assert without - with_room == states


@given(room=st.integers(1, 80), host=st.integers(0, 64))
def test_the_longest_sequence_of_a_refusal_is_computed(room, host):
    settings = kit.Settings(lora_r=32)
    with pytest.raises(MemoryError, match="the longest sequence is about") as refusal:
        choose_devices(LLAMA, settings, 2, 2_000_000, room * GIB, host * GIB, False)
    longest = int(re.search(r"longest sequence is about ([\d,]+)", str(refusal.value))[1].replace(",", ""))
    if longest:
        assert choose_devices(LLAMA, settings, 2, longest, room * GIB, host * GIB, False)[1] <= room * GIB


@pytest.mark.parametrize(
    ("tokens", "tile", "expand_kv", "measured"),
    [
        (1024, None, False, 0.40), (4096, None, False, 1.08), (16384, 4096, False, 2.47), (16384, 1024, False, 2.11),
        (16384, 4096, True, 2.57), (65536, 4096, False, 8.49),
    ],
)  # fmt: skip
def test_activations_agree_with_the_peaks_measured_on_an_h200(tokens, tile, expand_kv, measured):
    """GiB above idle by the driver's count, without gradients: README, Llama-3.1-8B, checkpoints offloaded."""
    settings, devices = kit.Settings(lora_r=32, logprob_chunk_size=1), Devices(True, True, tile, expand_kv)
    estimate = activations(LLAMA, settings, 2, tokens, devices, 10**12) / GIB
    assert estimate == pytest.approx(measured, rel=0.07)


MEASURED = sorted((Path(__file__).parent.parent / "docs" / "measured").glob("*.json"))
ROWS = [row for file in MEASURED for row in json.loads(file.read_text()) if "devices" in row]
KEPT = [row for row in ROWS if "--keep" in row["arguments"]]  # whose micro-batches follow from the free memory of then


@pytest.mark.parametrize("row", KEPT, ids=lambda row: f"{row['name']}, {row['length']:,} tokens")
def test_where_layers_keep_their_activations_the_runs_own_plan_was_within_a_twentieth(row):
    assert row["asleep"] == pytest.approx(row["planned_asleep"], rel=0.05)
    assert row["awake"] == pytest.approx(row["planned_awake"], rel=0.05)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row not in KEPT], ids=lambda row: f"{row['name']}, {row['length']:,} tokens"
)
def test_the_plan_is_within_a_twentieth_of_the_peaks_measured_on_an_h200(row):
    """What the driver counted in whole steps, training and generating, on the card that was emulated: README."""
    options = benchmark.parse(["measure", *row["arguments"].split()])
    longest = max(int(length) for length in options.lengths.split(","))
    settings = at_length(settings_for(options, row["utilization"], longest), row["length"])
    config = SimpleNamespace(**SHAPES[options.model])
    planned = sizes(config, settings, 2)
    needed = activations(
        config, settings, 2, settings.max_tokens_per_micro_batch, Devices(**row["devices"]), host=10**12
    )
    planned = dataclasses.replace(planned, activations=needed)
    several = not row["status"].startswith("1 steps")
    awake, asleep = planned.peaks(int(row["kv_cache"] * GIB), bool(row["standby"]), trained_before=several)
    assert asleep / GIB == pytest.approx(row["asleep"], rel=0.05)
    assert awake / GIB == pytest.approx(row["awake"], rel=0.05)


def test_short_sequences_share_a_micro_batch_where_there_is_room():
    settings = kit.Settings(max_prompt_length=512, max_completion_length=512)
    assert micro_batch_tokens(LLAMA, settings, 2, 60 * GIB, False)[0] == 8 * 1024
    assert micro_batch_tokens(LLAMA, settings, 2, GIB, False)[0] == 1024


def test_the_table_shows_the_three_ways():
    table = kit.plan(kit.presets.QUICKSTART).columns
    assert list(table) == ["GiB, estimated", "two engines", "shared weights", "shared + Standby"]
    needed = [float(table[way][-1]) for way in list(table)[1:]]
    assert needed == sorted(needed, reverse=True)
