"""load() -> Policy: the engine, the shared model, the adapter and the tokenizer, as one thing."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .presets import Settings
from .standby import Standby


class Policy:
    """A language model that can be sampled and trained. Made by `load`."""

    def __init__(self, settings, engine, model, tokenizer, ledger=None) -> None:
        from .adapter import Slot
        from .sharing import base_parameters

        self.settings, self.engine, self.tokenizer = settings, engine, tokenizer
        self.model = model
        """the PEFT model; its base weights are views of the engine's"""
        self.slot = Slot(engine, model)
        self.standby = Standby(engine, enabled=True)
        self.ledger = ledger
        """the memory ledger (`memory.Ledger`); None on a CPU"""
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in base_parameters(model))
        self.idle_bytes = 0
        """what this process holds on the card when the engine sleeps and nothing trains, by the driver"""
        self.host_store = None
        """pinned host memory for long sequences; made by the first run that needs it, kept for the next"""

    @property
    def device(self):
        return next(self.model.parameters()).device

    def sample(self, prompts: Any, *, n: int = 1, use_adapter: bool = True, seed: int | None = None, **sampling: Any):
        """Completions for some prompts, as a table that a notebook shows.

        `prompts`: rows of a dataset (`dataset[:4]`), a list of strings, or a list of message lists. `n` completions
        each. Sampling settings are the run's unless given (`temperature=0`: greedy). `use_adapter=False` samples the
        base model.
        """
        from .data import prepare_prompts

        rows = as_rows(prompts)
        prepared = prepare_prompts(rows, self.tokenizer, self.settings)
        with self.standby.awake():
            groups = self.engine.generate(
                prepared.prompt_ids,
                n=n,
                seed=self.settings.seed if seed is None else seed,
                lora_request=self.slot.request if use_adapter else None,
                **sampling,
            )
        arguments = {"n": n, "use_adapter": use_adapter, "seed": seed, **sampling}
        return Samples(prepared.rows, [[completion.text for completion in group] for group in groups], arguments)

    def sync(self) -> None:
        """Make the sampler the trained policy: copy the adapter into the engine's slot."""
        self.slot.copy_from(self.model)

    def save(self, folder: str | Path) -> Path:
        """The adapter as plain PEFT files, with the tokenizer."""
        from .adapter import save_adapter

        return save_adapter(self.model, self.tokenizer, folder)

    def load_adapter(self, folder: str | Path) -> None:
        """Go on from an adapter that was saved before; the sampler follows."""
        from .adapter import load_adapter

        load_adapter(self.model, folder)
        self.sync()


class Samples:
    """Prompts with their completions. `samples[i]` is the list of completions of prompt i."""

    def __init__(self, rows: Sequence[dict[str, Any]], completions: Sequence[list[str]], sampling: dict) -> None:
        self.rows, self.completions, self.sampling = list(rows), list(completions), sampling

    def __getitem__(self, index: int) -> list[str]:
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def columns(self) -> dict[str, list[str]]:
        return {"prompt": [last_message(row["prompt"]) for row in self.rows]} | {
            "completion": ["\n---\n".join(group) for group in self.completions]
        }

    def __repr__(self) -> str:
        return text_table(self.columns)

    def _repr_html_(self) -> str:
        return html_table(self.columns)


def as_rows(prompts: Any) -> list[dict[str, Any]]:
    """Rows with a `prompt` from whatever a slice of a dataset, a list of strings or of message lists is."""
    if isinstance(prompts, dict):  # what datasets.Dataset[:4] gives
        return [dict(zip(prompts, values, strict=True)) for values in zip(*prompts.values(), strict=True)]
    return [row if isinstance(row, dict) and "role" not in row else {"prompt": row} for row in prompts]


def last_message(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def text_table(columns: dict[str, list[str]], width: int = 60) -> str:
    import textwrap

    lines = []
    for i in range(len(next(iter(columns.values()), []))):
        for name, values in columns.items():
            wrapped = [w for line in str(values[i]).splitlines() or [""] for w in textwrap.wrap(line, width) or [""]]
            lines += [f"{name if j == 0 else '':>12}  {text}" for j, text in enumerate(wrapped)]
        lines.append("")
    return "\n".join(lines)


def html_table(columns: dict[str, list[str]]) -> str:
    cell = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:32em;padding:4px 12px"'
    head = "".join(f"<th {cell}>{html.escape(name)}</th>" for name in columns)
    rows = zip(*columns.values(), strict=True)
    body = "".join("<tr>" + "".join(f"<td {cell}>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cuda_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def load(settings: Settings) -> Policy:
    """Start the engine and share its weights with a transformers model that carries the adapter.

    Prints each phase with its seconds. Raises before anything heavy: a model that doesn't exist, an architecture that
    can't be shared, an environment that can't work.
    """
    from .sources import resolve_model

    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {what}")

    folder = resolve_model(settings.model_name_or_path)
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    from .sharing import check_shareable, share_weights

    check_shareable(config)
    from .engine import Engine
    from .memory import Driver, Ledger, choose_memory

    ledger = Ledger(Driver()) if cuda_is_here() else None
    choice = choose_memory(settings, config)
    print(choice)
    engine = Engine.start(folder, settings, choice)
    say(f"engine ready: the KV cache holds {engine.kv_cache_tokens:,} tokens")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    from .adapter import add_adapter

    model = add_adapter(share_weights(engine.model, config, engine.dtype), settings)
    say("transformers model sharing the engine's weights")
    policy = Policy(settings, engine, model, tokenizer, ledger)
    freed = policy.standby.sleep()
    if ledger:
        policy.idle_bytes = ledger.sample()
    say(f"asleep; the driver says {freed / 2**30:.2f} GiB came free" if policy.standby.enabled else "ready")
    return policy
