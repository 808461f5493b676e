"""Datasets to prompts: templates, lengths, filters, an order that can be resumed. No torch here.

A dataset is a `datasets.Dataset`, a list of dicts, or anything iterable of dicts, with a `prompt` column: text
(plain), or a list of `{"role", "content"}` messages (conversational). Other columns go to the reward functions.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .presets import Settings, in_ci
from .rewards import RESERVED

SYSTEM_PROMPT = (
    "Think first, between <reasoning> and </reasoning>. "
    "Then give the number alone, between <answer> and </answer>, as in <answer>12</answer>."
)


@lru_cache(maxsize=4)
def _epoch_order(epoch: int, n: int, seed: int, shuffle: bool) -> list[int]:
    order = list(range(n))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)  # a string seed is hashed the same way in every process
    return order


def step_indices(step: int, n: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> list[int]:
    """The rows of generation step `step` (from 0): a pure function, so that a resumed run needs no stored position.

    Epochs follow each other without a gap, each a permutation seeded by (seed, epoch); a dataset smaller than one
    step goes round several times within it.
    """
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [_epoch_order(p // n, n, seed, shuffle)[p % n] for p in positions]


@dataclass(frozen=True)
class Prompts:
    """What a run trains on; `prompts.indices(step)` are the rows of a step."""

    rows: list[dict[str, Any]]
    """the dataset's rows that were kept, in its order"""
    prompt_ids: list[list[int]]
    """token ids of each row's prompt, rendered by the template; exactly one BOS where the model has one"""
    columns: tuple[str, ...]
    """names of the other columns"""
    prompts_per_step: int
    seed: int
    shuffle: bool
    num_filtered: int = 0
    """prompts left out because they were too long"""

    def __len__(self) -> int:
        return len(self.rows)

    def indices(self, step: int) -> list[int]:
        """Rows of generation step `step`, counted from 0; the same in a resumed run (see `step_indices`)."""
        return step_indices(step, len(self), self.prompts_per_step, self.seed, self.shuffle)

    def reward_columns(self, indices: Iterable[int], num_generations: int) -> dict[str, list]:
        """The other columns as reward functions get them: each row's value repeated for its completions."""
        repeated = [index for index in indices for _ in range(num_generations)]
        return {name: [self.rows[index].get(name) for index in repeated] for name in self.columns}


def _check_prompt(index: int, row: dict[str, Any]) -> bool:
    """Whether row `index` is conversational; an error that names it if it holds no prompt."""
    if "prompt" not in row:
        raise ValueError(f"the dataset needs a column 'prompt'; row {index} has {', '.join(map(str, row)) or 'none'}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"the prompt of row {index} is empty")
        return False
    if prompt is None or len(prompt) == 0:
        raise ValueError(f"the prompt of row {index} is empty")
    if not all(isinstance(message, dict) and "role" in message and "content" in message for message in prompt):
        raise ValueError(f"the prompt of row {index} is neither text nor a list of messages with 'role' and 'content'")
    if not any(message["content"] for message in prompt):
        raise ValueError(f"the prompt of row {index} is empty: none of its messages has content")
    return True


def _render(prompt: list[dict], tokenizer: Any, kwargs: dict[str, Any]) -> str:
    # A prompt that ends with the assistant's words is to be continued, not answered; TRL does the same.
    continued = prompt[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued, **kwargs
    )


def encode_prompts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids with exactly one BOS, whether the text begins with it, the tokenizer adds it, or both; none for a
    model that has none. Nothing is added at the end: a tokenizer that appends EOS would end the turn there."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    adds_bos = tokenizer("a")["input_ids"][:1] == [bos]

    def with_one_bos(row: list[int]) -> list[int]:
        leading = next((i for i, token in enumerate(row) if token != bos), len(row))
        return row[leading - 1 :] if leading else [bos, *row] if adds_bos else row

    return [with_one_bos(row) for row in ids]


def prepare_prompts(dataset: Iterable[dict[str, Any]], tokenizer: Any, settings: Settings) -> Prompts:
    """Renders, tokenizes and filters the prompts, once, before training.

    Prompts with more tokens than `max_prompt_length`, or than the window leaves beside `max_completion_length`, are
    left out and counted, never cut: a cut prompt often has lost its question.

    Raises:
        ValueError: no `prompt` column, an empty prompt (with its row), a column under a reward argument's name, plain
            and conversational prompts mixed, messages but no chat template, or nothing left to train on.
    """
    rows = [dict(row) for row in dataset]
    if not rows:
        raise ValueError("the dataset is empty")
    kinds = [_check_prompt(index, row) for index, row in enumerate(rows)]
    if len(set(kinds)) > 1:
        raise ValueError(f"row 0 and row {kinds.index(not kinds[0])} differ: one prompt is text, one is messages")
    columns = tuple(dict.fromkeys(name for row in rows for name in row if name != "prompt"))
    taken = [name for name in columns if name in RESERVED]
    if taken:
        raise ValueError(f"rename the dataset's column {taken[0]!r}: reward functions get that from the trainer")

    if kinds[0]:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the prompts are messages, but the tokenizer has no chat template (base models have none): set "
                "tokenizer.chat_template, use the model's instruct version, or give prompts as plain text"
            )
        texts = [_render(row["prompt"], tokenizer, settings.chat_template_kwargs or {}) for row in rows]
    else:
        texts = [row["prompt"] for row in rows]
    ids = encode_prompts(texts, tokenizer)
    if [] in ids:
        raise ValueError(
            f"the prompt of row {ids.index([])} has no tokens left: the tokenizer knows none of its words; does it "
            f"belong to this model?"
        )

    window = settings.max_model_length - settings.max_completion_length
    limit, name = window, "vllm_max_model_length - max_completion_length"
    if settings.vllm_max_model_length is None:
        name = "max_prompt_length" + (", 512 unless set," if settings.max_prompt_length is None else "")
    elif settings.max_prompt_length is not None and settings.max_prompt_length <= window:
        limit, name = settings.max_prompt_length, "max_prompt_length"
    kept = [index for index in range(len(rows)) if len(ids[index]) <= limit]
    filtered = len(rows) - len(kept)
    if filtered:
        longest = max(map(len, ids))
        message = f"{filtered} of {len(rows)} prompts have more than {limit} tokens ({name}), up to {longest}"
        if not kept:
            raise ValueError(f"{message}: none is left; raise the limit or shorten the prompts")
        print(f"{message}: left out")
    return Prompts(
        rows=[rows[index] for index in kept],
        prompt_ids=[ids[index] for index in kept],
        columns=columns,
        prompts_per_step=settings.prompts_per_step,
        seed=settings.seed,
        shuffle=settings.shuffle_dataset,
        num_filtered=filtered,
    )


def _is_plain(tokenizer: Any) -> bool:
    return tokenizer is not None and getattr(tokenizer, "chat_template", None) is None


def _prompt(question: str, plain: bool) -> str | list[dict[str, str]]:
    if plain:
        return f"{SYSTEM_PROMPT}\n\n{question}\n"
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def gsm8k_row(row: dict[str, str], plain: bool = False) -> dict[str, Any]:
    """One row of GSM8K (`question`, `answer` with the number after ####) as `prompt` and `answer`."""
    return {
        "prompt": _prompt(row["question"].strip(), plain),
        "answer": row["answer"].rpartition("####")[2].strip().replace(",", ""),
    }


def gsm8k(tokenizer: Any = None, split: str = "train") -> Any:
    """GSM8K (https://huggingface.co/datasets/openai/gsm8k, MIT): 7,473 school problems, 1,319 in `test`.

    Returns a `datasets.Dataset` with `prompt` (messages; plain text if `tokenizer` has no chat template) and
    `answer` (the number as text). With COLAB_KIT_CI=1, as automatic tests of the notebooks set it, `arithmetic()`.

    Raises:
        RuntimeError: the hub can't be reached and the cache has no copy.
    """
    if in_ci():
        print("COLAB_KIT_CI=1: sums in the place of GSM8K")
        return arithmetic(n=64 if split == "train" else 8, seed=len(split), tokenizer=tokenizer)
    import datasets

    try:
        dataset = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as err:  # several libraries' own errors, depending on where the network ends
        raise RuntimeError(
            f"GSM8K (split {split!r}) could not be loaded from the Hugging Face hub: {type(err).__name__}: {err}. "
            "Check the network, run this cell again, or use data.arithmetic(), which needs none."
        ) from err
    return dataset.map(gsm8k_row, fn_kwargs={"plain": _is_plain(tokenizer)}, remove_columns=dataset.column_names)


def arithmetic(n: int = 256, seed: int = 0, digits: int = 1, tokenizer: Any = None) -> Any:
    """`n` sums of two numbers of up to `digits` digits, such as "What is 3 + 4?": a dataset that needs no network.

    Returns a `datasets.Dataset` with the columns of `gsm8k`; the same `seed` gives the same rows.
    """
    import datasets

    if n < 1 or digits < 1:
        raise ValueError(f"n and digits must be at least 1; got n={n}, digits={digits}")
    rng = random.Random(seed)
    pairs = [(rng.randrange(10**digits), rng.randrange(10**digits)) for _ in range(n)]
    return datasets.Dataset.from_list(
        [{"prompt": _prompt(f"What is {a} + {b}?", _is_plain(tokenizer)), "answer": str(a + b)} for a, b in pairs]
    )
