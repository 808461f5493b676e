"""The ready-made rewards."""

import pytest

from colab_kit.rewards import (
    RewardError,
    completion_text,
    correct_number,
    extract_number,
    extract_tag,
    format_reward,
    length_shaping,
    score,
    tag_format,
)


@pytest.mark.parametrize(
    "text, number",
    [
        ("1,000", 1000),
        ("-5", -5),
        ("5.0", 5),
        ("$1,234.50", 1234.5),
        ("-$5", -5),
        ("$-5", -5),
        ("first 7, then\n#### 42", 42),
        ("3 or 4", 4),
        ("the answer is 42.", 42),
        ("10-5", 5),
        ("(-5)", -5),
        ("\N{MINUS SIGN}5", -5),
        ("3, 4", 4),
        ("1,000, I think", 1000),
        ("12,345,678 people", 12345678),
        (".5", 0.5),
        ("2e3", 2000),
        ("1e999", None),
        ("50%", 50),
        (r"\boxed{-7}", -7),
        ("no number", None),
        ("#### none", None),
        ("", None),
        (None, None),
        (7, 7),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert extract_number(text) == number


def test_a_correct_number_is_paid_between_its_tags_and_an_attempt_less():
    func = correct_number(attempt=0.1)
    completions = ["<answer>$1,000</answer>", "<answer>7</answer>", "1000", "<answer>none</answer>"]
    assert func(completions=completions, answer=["1000"] * 4) == [1.0, 0.1, 0.0, 0.0]
    loose = correct_number(column="target", tag=None)
    assert loose(completions=["it is 5.0"], target=["x #### 5"]) == [1.0]
    assert loose(completions=["5"], target=["unknown"]) == [None], "a row without a number is not scored"
    with pytest.raises(RewardError, match="reads column 'target'"):
        score(loose, ["?"], ["1"], [[5]], {"answer": ["1"]})


def test_tags_must_each_stand_once_in_order_and_hold_something():
    func = tag_format("reasoning", "answer")
    good = "<reasoning>2 and 2</reasoning>\n<answer>4</answer>"
    bad = [
        "<answer>4</answer><reasoning>2 and 2</reasoning>",
        good + "<answer>5</answer>",
        "<reasoning></reasoning><answer>4</answer>",
        "<reasoning>2<answer>4</answer></reasoning>",
        "<reasoning>2</reasoning><answer>4",
    ]
    assert func(completions=[good]) == [1.0] and func(completions=bad) == [0.0] * 5
    halves = tag_format("reasoning", "answer", partial=True)
    assert halves(completions=[good, bad[-1], "4"]) == [1.0, 0.5, 0.0]
    assert extract_tag(good, "answer") == "4" and extract_tag("<answer>4", "answer") is None
    assert extract_tag("<answer><answer>3</answer> <answer>\n4 </answer>", "answer") == "4"


def test_a_pattern_must_match_the_whole_completion():
    func = format_reward(r"<a>.*</a>", reward=0.5, name="a_format")
    assert func(completions=["<a>1\n2</a>\n", "so: <a>1</a>"]) == [0.5, 0.0] and func.__name__ == "a_format"


def test_length_shaping_falls_from_0_to_minus_1_over_the_last_tokens():
    func = length_shaping(max_completion_len=10, soft_punish_cache=4)
    assert func(completion_ids=[[0] * n for n in (0, 6, 7, 8, 10, 12)]) == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="soft_punish_cache"):
        length_shaping(10, 11)


def test_conversational_completions_are_read_like_plain_ones():
    message = [{"role": "assistant", "content": "<answer>4</answer>"}]
    assert completion_text(message) == "<answer>4</answer>"
    assert completion_text([{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]) == "4"
    assert correct_number()(completions=[message], answer=[4]) == [1.0]
