"""The environment contract and the states awake and asleep."""

import pytest

IMPORT = "import json, os, colab_kit as kit\n"


def test_the_package_loads_neither_torch_nor_vllm(in_fresh_process):
    """So that cell 1 can set the environment before they read it."""
    code = IMPORT + "import sys; kit.enable_standby(); heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
    code += "print(json.dumps(sorted(heavy)))"
    assert in_fresh_process(code) == []


def test_cell_one_sets_the_variable_that_unsloths_notebooks_use(in_fresh_process):
    code = "import os; os.environ.pop('UNSLOTH_VLLM_STANDBY', 0)\n" + IMPORT
    code += "kit.enable_standby(); print(json.dumps(os.environ['UNSLOTH_VLLM_STANDBY']))"
    assert in_fresh_process(code) == "1"


def test_a_value_set_before_stays_and_is_said(in_fresh_process):
    code = IMPORT + "kit.enable_standby(); print(json.dumps(os.environ['UNSLOTH_VLLM_STANDBY']))"
    done = in_fresh_process(code, check=False, UNSLOTH_VLLM_STANDBY="0")
    assert done.stdout.splitlines() == ["UNSLOTH_VLLM_STANDBY=0 was set before this cell and stays so.", '"0"']


@pytest.mark.parametrize("value", ["yes", "2", ""])
def test_any_other_value_is_refused(value, in_fresh_process):
    done = in_fresh_process(IMPORT + "kit.enable_standby()", check=False, UNSLOTH_VLLM_STANDBY=value)
    assert f"ValueError: UNSLOTH_VLLM_STANDBY={value!r}: set it to 1" in done.stderr


def test_after_vllm_was_imported_it_is_too_late(in_fresh_process):
    code = "import os, sys, types; os.environ.pop('UNSLOTH_VLLM_STANDBY', 0); import vllm; import colab_kit as kit\n"
    done = in_fresh_process(code + "kit.enable_standby()", check=False)
    assert "must be set before vLLM is imported" in done.stderr
    assert "restart the kernel" in done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_name(name, in_fresh_process):
    done = in_fresh_process(IMPORT + "kit.enable_standby()", check=False, **{name: "expandable_segments:True"})
    assert f"ValueError: {name} has expandable_segments:True" in done.stderr


def test_it_sleeps_after_load_and_after_every_call(tiny_policy, tiny_rows):
    standby = tiny_policy.standby
    assert not standby.is_awake
    tiny_policy.sample(tiny_rows[:1])
    assert not standby.is_awake


def test_sleeping_and_waking_twice_is_as_good_as_once(tiny_policy):
    standby = tiny_policy.standby
    standby.wake()
    standby.wake()
    assert standby.is_awake
    standby.sleep()
    assert standby.sleep() == 0
    assert not standby.is_awake


def test_an_exception_inside_leaves_it_asleep(tiny_policy):
    with pytest.raises(ZeroDivisionError), tiny_policy.standby.awake():
        raise ZeroDivisionError
    assert not tiny_policy.standby.is_awake
    with tiny_policy.standby.awake():
        with tiny_policy.standby.asleep():
            assert not tiny_policy.standby.is_awake
        assert tiny_policy.standby.is_awake


def test_an_interrupt_while_generating_leaves_an_idle_engine(tiny_policy, tiny_rows):
    """Ctrl-C in the middle of a rollout: nothing stays queued, and the next call works."""

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tiny_policy.standby.awake():
        tiny_policy.engine.generate([[0, 5, 6]] * 4, n=2, progress=interrupt)
    assert not tiny_policy.standby.is_awake
    assert not tiny_policy.engine.core.scheduler.has_requests()
    assert len(tiny_policy.sample(tiny_rows[:2])) == 2


def test_greedy_output_is_the_same_after_a_cycle(tiny_policy, tiny_rows):
    before = tiny_policy.sample(tiny_rows[:4], temperature=0)
    for _ in range(3):
        tiny_policy.standby.wake()
        tiny_policy.standby.sleep()
    assert tiny_policy.sample(tiny_rows[:4], temperature=0).completions == before.completions


def test_an_error_while_vllm_starts_is_not_replaced_by_another():
    from colab_kit.engine import real_file_descriptors

    with pytest.raises(AttributeError, match="vLLM's own"), real_file_descriptors():
        raise AttributeError("vLLM's own")
