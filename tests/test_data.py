"""From a dataset to token ids: one BOS, nothing cut, an order that resumes."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from colab_kit import data
from colab_kit.presets import Settings
from colab_kit.rewards import correct_number

BOS, EOS = 1, 2
WORDS = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "hello", "world", "user", "bot", "nice", "a"])}
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}{{ reply | default('bot') }} {% endif %}"
)


def make_tokenizer(adds_bos, template=None, has_bos=True):
    """Words and spaces; with `adds_bos` the tokenizer itself puts <s> in front and </s> at the end."""
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    names = {"bos_token": "<s>"} if has_bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", **names)
    tokenizer.chat_template = template
    return tokenizer


def chat(text="hello world"):
    return [{"role": "user", "content": text}]


def prepare(rows, tokenizer=None, **changes):
    settings = Settings(num_generations=2, per_device_train_batch_size=4, max_completion_length=8, **changes)
    return data.prepare_prompts(rows, tokenizer or make_tokenizer(False), settings)


@pytest.mark.parametrize("in_template", ["", "{{ bos_token }}", "<s> <s> "])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_there_is_exactly_one_bos_whatever_template_and_tokenizer_do(in_template, adds_bos):
    template = in_template and in_template + " "
    tokenizer = make_tokenizer(adds_bos, template + PLAIN_TEMPLATE)
    ids = prepare([{"prompt": chat()}], tokenizer).prompt_ids[0]
    body = [WORDS[word] for word in "user hello world bot".split()]
    assert ids == ([BOS] if in_template or adds_bos else []) + body


def test_a_plain_prompt_gets_the_tokenizer_s_bos_but_no_end_token():
    assert prepare([{"prompt": "hello world"}], make_tokenizer(True)).prompt_ids == [[BOS, 3, 4]]
    assert prepare([{"prompt": "<s> hello"}], make_tokenizer(True)).prompt_ids == [[BOS, 3]]
    assert prepare([{"prompt": "hello </s> world"}]).prompt_ids == [[3, EOS, 4]], "an EOS inside a prompt stays"


def test_a_model_without_bos_gets_none():
    assert prepare([{"prompt": "hello"}], make_tokenizer(False, has_bos=False)).prompt_ids == [[3]]


def test_template_kwargs_reach_the_template_and_an_assistant_s_beginning_is_continued():
    tokenizer = make_tokenizer(False, PLAIN_TEMPLATE)
    rows = [{"prompt": chat("hello")}]
    assert prepare(rows, tokenizer, chat_template_kwargs={"reply": "nice"}).prompt_ids == [[5, 3, 7]]
    begun = [{"prompt": chat("hello") + [{"role": "assistant", "content": "nice"}]}]
    assert prepare(begun, tokenizer).prompt_ids[0][-1] == WORDS["nice"]


def test_too_long_prompts_are_left_out_and_counted_never_cut(capsys):
    rows = [{"prompt": "hello " * n, "answer": n} for n in (1, 5, 2, 9)]
    prompts = prepare(rows, max_prompt_length=2)
    assert [len(ids) for ids in prompts.prompt_ids] == [1, 2]
    assert [row["answer"] for row in prompts.rows] == [1, 2] and prompts.num_filtered == 2
    assert "2 of 4 prompts have more than 2 tokens (max_prompt_length), up to 9" in capsys.readouterr().out
    windowed = prepare(rows, max_prompt_length=50, vllm_max_model_length=13)
    assert windowed.num_filtered == 1
    assert "5 tokens (vllm_max_model_length - max_completion_length)" in capsys.readouterr().out
    assert prepare(rows).num_filtered == 0 and not capsys.readouterr().out
    with pytest.raises(ValueError, match="4 of 4 prompts have more than 1 tokens .*none is left"):
        prepare([{"prompt": "hello world"}] * 4, max_prompt_length=1)


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], "the dataset is empty"),
        ([{"question": "?", "answer": 1}], "'prompt'; row 0 has question, answer"),
        ([{"prompt": "hello"}, {"prompt": "  "}], "row 1 is empty"),
        ([{"prompt": "hello"}, {"prompt": None}], "row 1 is empty"),
        ([{"prompt": []}], "row 0 is empty"),
        ([{"prompt": chat("")}], "row 0 is empty"),
        ([{"prompt": [{"text": "hello"}]}], "row 0 is neither"),
        ([{"prompt": "hello"}, {"prompt": chat()}], "row 0 and row 1 differ"),
        ([{"prompt": "hello", "completions": 1}], "rename the dataset's column 'completions'"),
        ([{"prompt": chat()}], "no chat template"),
    ],
)
def test_a_dataset_that_cannot_be_used_says_why_and_where(rows, words):
    with pytest.raises(ValueError, match=words):
        prepare(rows)


def test_a_tokenizer_that_knows_no_word_of_a_prompt_is_named_before_anything_is_generated():
    core = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    with pytest.raises(ValueError, match="row 1 has no tokens left"):
        prepare([{"prompt": "a"}, {"prompt": "hello"}], tokenizer)


def test_any_iterable_of_rows_will_do_and_columns_are_repeated_for_the_completions():
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "hello", "answer": "1"}, {"prompt": "world", "answer": "2"}]
    for dataset in (rows, iter(rows), datasets.Dataset.from_list(rows)):
        prompts = prepare(dataset)
        assert len(prompts) == 2 and prompts.columns == ("answer",)
        assert prompts.reward_columns([1, 0], 2) == {"answer": ["2", "2", "1", "1"]}


@hypothesis_settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 5), st.booleans())
def test_every_epoch_holds_every_row_once_however_small_the_dataset(n, per_step, seed, shuffle):
    steps = [data.step_indices(step, n, per_step, seed, shuffle) for step in range(2 * n)]
    assert all(len(step) == per_step for step in steps)
    flat = [index for step in steps for index in step]
    for epoch in range(len(flat) // n):
        assert sorted(flat[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_a_resumed_run_goes_on_in_the_same_order_and_seeds_and_epochs_differ():
    rows = [{"prompt": "hello", "answer": i} for i in range(40)]  # duplicated prompts are fine
    first, again, other = prepare(rows, seed=1), prepare(rows, seed=1), prepare(rows, seed=2)
    order = [first.indices(step) for step in range(40)]
    assert again.indices(33) == order[33] and again.indices(5) == order[5]
    assert [other.indices(step) for step in range(40)] != order
    assert order[:20] != order[20:], "each epoch has its own order"
    straight = prepare(rows, shuffle_dataset=False)
    assert straight.indices(0) == [0, 1] and straight.indices(20) == [0, 1]


def test_the_order_is_the_same_in_every_process():
    code = "from colab_kit.data import step_indices; print(step_indices(3, 100, 4, 42))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{data.step_indices(3, 100, 4, 42)}\n".encode()}


def test_a_gsm8k_row_becomes_messages_and_a_number():
    row = {"question": " How many? ", "answer": "He has 2 * 500 = <<2*500=1000>>1000.\n#### 1,000"}
    made = data.gsm8k_row(row)
    assert made["answer"] == "1000" and [m["role"] for m in made["prompt"]] == ["system", "user"]
    assert made["prompt"][1]["content"] == "How many?" and "<answer>" in made["prompt"][0]["content"]
    assert data.gsm8k_row(row, plain=True)["prompt"].endswith("How many?\n")


def test_gsm8k_without_a_network_says_what_to_do(tmp_path):
    code = "from colab_kit import data; data.gsm8k()"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "COLAB_KIT_CI": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "RuntimeError: GSM8K" in run.stderr and "data.arithmetic()" in run.stderr.splitlines()[-1]


def test_arithmetic_needs_no_network_and_its_answers_are_right():
    pytest.importorskip("datasets")
    dataset = data.arithmetic(n=20, seed=3, digits=2)
    assert dataset[:] == data.arithmetic(n=20, seed=3, digits=2)[:] != data.arithmetic(n=20, seed=4, digits=2)[:]
    for row in dataset:
        question = row["prompt"][-1]["content"]
        a, b = question.removeprefix("What is ").removesuffix("?").split(" + ")
        assert correct_number()(completions=[f"<answer>{int(a) + int(b)}</answer>"], answer=[row["answer"]]) == [1.0]
    plain = data.arithmetic(n=1, tokenizer=make_tokenizer(False))
    assert isinstance(plain[0]["prompt"], str), "a tokenizer without a chat template gets plain prompts"
    with pytest.raises(ValueError, match="digits"):
        data.arithmetic(digits=0)
