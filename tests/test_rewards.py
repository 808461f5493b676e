"""The reward contract: what a function is given, what it may return, and how its mistakes are reported."""

import asyncio
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from colab_kit.presets import Settings
from colab_kit.rewards import (
    RewardError,
    correct_number,
    length_shaping,
    reward_name,
    score,
    tag_format,
    try_rewards,
    validate_reward_funcs,
)

PROMPTS = ["2 + 2?", "2 + 2?"]
COMPLETIONS = ["4", "five"]
IDS = [[4], [5, 6]]


def rows(func, columns=None, **kwargs):
    return score(func, PROMPTS, COMPLETIONS, IDS, columns or {}, **kwargs).rows


def test_a_function_gets_everything_by_keyword_and_columns_as_lists():
    def func(prompts, completions, completion_ids, answer, **kwargs):
        assert prompts == PROMPTS and completions == COMPLETIONS and completion_ids == IDS
        assert answer == ["4", "4"] and kwargs["level"] == [1, 2]
        assert kwargs["trainer_state"].global_step == 3
        return [1, 0]

    state = SimpleNamespace(global_step=3)
    assert rows(func, {"answer": ["4", "4"], "level": [1, 2]}, trainer_state=state) == [[1.0], [0.0]]


def test_a_function_may_name_only_what_it_uses_in_any_order():
    def named(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def positional_only(completions, /, **kwargs):
        assert "completions" not in kwargs and "answer" in kwargs
        return [len(c) for c in completions]

    class Judge:
        def __call__(self, completion_ids, scale=2.0):
            return [scale * len(ids) for ids in completion_ids]

    columns = {"answer": ["4", "4"], "other": [0, 0]}
    funcs = [named, positional_only, Judge(), partial(named)]
    scores = score(funcs, PROMPTS, COMPLETIONS, IDS, columns)
    assert scores.rows == [[1.0, 1.0, 2.0, 1.0], [0.0, 4.0, 4.0, 0.0]]
    assert scores.names == ["named", "positional_only", "Judge", "named"]


def test_a_misspelt_column_is_named_with_the_nearest_one_before_anything_runs():
    ran = []

    def fine(completions):
        ran.append(1)
        return [0, 0]

    def misspelt(completions, answr):
        return [0, 0]

    with pytest.raises(RewardError, match=r"'misspelt' asks for 'answr'.*did you mean 'answer'"):
        rows([fine, misspelt], {"answer": [1, 2]})
    assert not ran


def test_none_is_not_scored_and_numpy_and_torch_numbers_are_numbers():
    assert rows(lambda completions: [None, True]) == [[None], [1.0]]
    assert rows(lambda completions: np.array([1.5, 2.0], dtype=np.float32)) == [[1.5], [2.0]]
    assert rows(lambda completions: torch.tensor([1.5, 2.0])) == [[1.5], [2.0]]
    assert rows(lambda completions: [np.int64(3), torch.tensor(0.5)]) == [[3.0], [0.5]]


@pytest.mark.parametrize(
    "returned, words",
    [
        ([1.0], "1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "3 rewards for 2"),
        ([1.0, float("nan")], "nan for row 1"),
        ([float("inf"), 0.0], "inf for row 0"),
        ([0.0, "1"], "row 1"),
        ([0.0, torch.zeros(2)], "row 1"),
        (1.0, "float"),
        (np.float32(1), "float32"),
        ("ab", "str"),
        (None, "NoneType"),
    ],
)
def test_a_wrong_result_names_the_function_and_the_row(returned, words):
    def broken(completions):
        return returned

    with pytest.raises(RewardError, match=f"(?s)'broken'.*{words}"):
        rows(broken)


def test_what_a_function_raises_is_the_cause_of_an_error_that_names_it_and_the_step():
    def broken(completions):
        return [1 / 0]

    with pytest.raises(RewardError, match=r"'broken' raised ZeroDivisionError.*2 completions at step 7") as error:
        rows(broken, trainer_state=SimpleNamespace(global_step=7))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_async_rewards_run_at_the_same_time_also_inside_a_running_event_loop():
    """Each of two waits for the other: one after the other they would never end."""
    first, second = [], []

    async def one(completions, log_metric):
        first.append(asyncio.Event())
        while not second:
            await asyncio.sleep(0.001)
        log_metric("calls", 1)
        return [1, 2]

    async def two(completions):
        second.append(1)
        while not first:
            await asyncio.sleep(0.001)
        return [3, None]

    async def as_in_a_notebook():
        return score([one, lambda completions: [0, 0], two], PROMPTS, COMPLETIONS, IDS)

    assert asyncio.run(as_in_a_notebook()).rows == [[1.0, 0.0, 3.0], [2.0, 0.0, None]]
    assert score([one, two], PROMPTS, COMPLETIONS, IDS).metrics == {"calls": 1.0}


def test_one_event_loop_lives_across_steps_so_that_sessions_may():
    loops = set()

    async def func(completions):
        loops.add(asyncio.get_running_loop())
        return [0, 0]

    rows(func), rows(func)
    assert len(loops) == 1


def test_an_async_reward_that_raises_is_named():
    async def broken(completions):
        raise KeyError("url")

    with pytest.raises(RewardError, match="'broken' raised KeyError"):
        rows([broken, lambda completions: [0, 0]])


def test_log_metric_is_averaged_and_log_extra_is_kept():
    def func(completions, log_metric, log_extra):
        log_metric("share", 1.0)
        log_metric("share", 0.0)
        log_extra("seen", completions)
        return [0, 0]

    scores = score(func, PROMPTS, COMPLETIONS, IDS)
    assert scores.metrics == {"share": 0.5} and scores.extra == {"seen": COMPLETIONS}


def test_what_a_reward_logs_beside_its_value_is_a_column_of_the_table():
    def right(completions, log_extra):
        log_extra("extracted", [text[-1] for text in completions])
        return [0.0, 1.0]

    table = str(try_rewards(right, ["it is 3", "it is 4"]))
    assert "extracted" in table.splitlines()[0] and table.splitlines()[2].split()[-1] == "4"
    with pytest.raises(ValueError, match=r"log_extra\('extracted'\) got 1 values for 2 completions"):
        try_rewards(lambda completions, log_extra: log_extra("extracted", ["3"]) or [0, 0], ["a", "b"])


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="answer has 1 entries for 2"):
        rows(lambda completions: [0, 0], {"answer": ["4"]})
    with pytest.raises(ValueError, match="log_metric"):
        rows(lambda completions: [0, 0], {"log_metric": [1, 2]})


def test_reward_funcs_are_checked_before_training():
    settings = Settings()
    good = correct_number()
    assert validate_reward_funcs(good, settings) == [good]
    with pytest.raises(TypeError, match=r"reward_funcs\[1\] is int"):
        validate_reward_funcs([good, 3], settings)
    with pytest.raises(ValueError, match="several functions called 'correct_number'"):
        validate_reward_funcs([good, correct_number()], settings)
    with pytest.raises(ValueError, match="reward_weights has 2 weights for 1 reward functions"):
        validate_reward_funcs([good], settings.replace(reward_weights=(1.0, 2.0)))
    with pytest.raises(ValueError, match="empty"):
        validate_reward_funcs([], settings)
    assert reward_name(partial(good)) == "correct_number"


def test_try_rewards_shows_each_reward_of_each_completion_as_text_and_as_a_table():
    table = try_rewards(
        [correct_number(), tag_format("reasoning", "answer")],
        ["<answer>4</answer> & more", "four"],
        prompts=[[{"role": "user", "content": "2 + 2?"}]] * 2,
        answer="4",
    )
    head, first, second = str(table).splitlines()
    assert head.split() == ["completion", "correct_number", "tag_format"]
    assert first.split()[-2:] == ["1", "0"] and second.split() == ["four", "0", "0"]
    page = table._repr_html_()
    assert ">correct_number</th>" in page and "&lt;answer&gt;4&lt;/answer&gt; &amp; more" in page
    assert "not scored" in str(try_rewards(lambda completions: [None], ["x"]))
    assert try_rewards(length_shaping(2, 1), ["x"], completion_ids=[[1, 2]]).scores.rows == [[-1.0]]


def test_with_conversational_prompts_a_string_reaches_the_function_as_in_training():
    def func(completions):
        return [float(c[0]["role"] == "assistant" and c[0]["content"] == "hi") for c in completions]

    assert try_rewards(func, ["hi"], prompts=[[{"role": "user", "content": "?"}]]).scores.rows == [[1.0]]


def test_importing_rewards_and_data_loads_no_torch():
    code = "import sys, colab_kit.rewards, colab_kit.data; assert not {'torch', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
