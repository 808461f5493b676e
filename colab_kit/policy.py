"""load() -> Policy: the engine, the shared model, the adapter and the tokenizer, as one thing."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from .interrupts import uninterrupted
from .presets import Settings
from .samples import Samples, as_rows
from .standby import Standby


class Policy:
    """A language model that can be sampled and trained. Made by `load`."""

    def __init__(self, settings, engine, model, tokenizer, plan, ledger=None) -> None:
        from .adapter import Slot
        from .sharing import base_parameters

        self.settings, self.engine, self.tokenizer = settings, engine, tokenizer
        self.model = model
        """the PEFT model; its base weights are views of the engine's"""
        self.plan = plan
        """what was planned before the load (`planning.Plan`)"""
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
        base model. The answers don't depend on what was sampled before: no cached prefix, which rounds differently, is
        read.
        """
        from .data import prepare_prompts
        from .engine import sampling_arguments

        rows = as_rows(prompts)
        prepared = prepare_prompts(rows, self.tokenizer, self.settings)
        with self.standby.awake():
            groups = self.engine.generate(
                prepared.prompt_ids,
                n=n,
                seed=self.settings.seed if seed is None else seed,
                lora_request=self.slot.request if use_adapter else None,
                **({"skip_reading_prefix_cache": True} | sampling_arguments(self.settings) | sampling),
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

    def load_adapter(self, folder: str | Path) -> bool:
        """Go on from an adapter that was saved before; the sampler follows. Returns whether that changed the policy."""
        from .adapter import load_adapter

        changed = load_adapter(self.model, folder)
        self.sync()
        return changed

    def merge(self, folder: str | Path, dtype: str | None = None) -> Path:
        """Base and adapter as one plain 16-bit checkpoint (see `export.merge`)."""
        from .export import merge

        return merge(self, folder, dtype)

    def push_to_hub(self, repo_id: str, token: str | None = None, merged: bool = False) -> str:
        """The adapter, or the merged model, on the Hugging Face hub (see `export.push_to_hub`)."""
        from .export import push_to_hub

        return push_to_hub(self, repo_id, token, merged)

    def __getattr__(self, name: str) -> Any:
        if "engine" not in self.__dict__ and not name.startswith("_"):
            raise RuntimeError("this policy was unloaded: call load(settings) again")
        raise AttributeError(name)


def cuda_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


ENGINE_FIELDS = (
    "model_name_or_path", "load_in_4bit", "dtype", "vllm_gpu_memory_utilization", "vllm_max_num_seqs",
    "vllm_attention_backend", "enforce_eager", "nf4_kernel",
)  # fmt: skip
LORA_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_loaded: Policy | None = None


def load(settings: Settings) -> Policy:
    """Start the engine and share its weights with a transformers model that carries the adapter.

    Prints each phase with its seconds. Raises before anything heavy: a model that doesn't exist, an architecture that
    can't be shared, an environment that can't work.

    There is one engine a process. Called again it returns the same policy, with its adapter as it is; with another LoRA
    rank, alpha, dropout or modules, the same policy with a fresh adapter; with another engine's settings it raises
    ValueError.
    """
    global _loaded
    if _loaded is not None:
        return _reload(_loaded, settings)
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
    from .memory import Driver, Ledger
    from .planning import machine, make_plan

    ledger = Ledger(Driver()) if cuda_is_here() else None
    choice = make_plan(settings, config, *machine())
    print("\n".join(choice.reasons))
    engine = Engine.start(folder, settings, choice)
    say(f"engine ready: the KV cache holds {engine.kv_cache_tokens:,} tokens")
    engine.products.loaded = True
    if chosen := engine.products.summary():
        say(chosen)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        from .adapter import add_adapter

        model = add_adapter(share_weights(engine.model, config, engine.dtype), settings)
        say("transformers model sharing the engine's weights")
        _loaded = policy = Policy(settings, engine, model, tokenizer, choice, ledger)
    except BaseException:
        engine.shut_down()
        raise
    freed = policy.standby.sleep()
    if ledger:
        policy.idle_bytes = ledger.sample()
    say(f"asleep; the driver says {freed / 2**30:.2f} GiB came free" if policy.standby.enabled else "ready")
    return policy


def _reload(policy: Policy, settings: Settings) -> Policy:
    from .adapter import Slot, renew_adapter
    from .planning import sizes

    check_same_engine(policy, settings)
    changed = [name for name in LORA_FIELDS if getattr(policy.settings, name) != getattr(settings, name)]
    if "lora_r" in changed and settings.lora_r > policy.engine.max_lora_rank:
        raise ValueError(
            f"lora_r={settings.lora_r}, but the engine was started for at most {policy.engine.max_lora_rank}: {AGAIN}"
        )
    if changed:
        policy.standby.sleep()
        with uninterrupted():
            policy.model = renew_adapter(policy.model, settings)
            policy.slot = Slot(policy.engine, policy.model)
        fresh = sizes(policy.model.get_base_model().config, settings, policy.engine.dtype.itemsize, cuda_is_here())
        planned = dataclasses.replace(fresh, activations=policy.plan.sizes.activations)
        policy.plan = dataclasses.replace(policy.plan, settings=settings, sizes=planned)
        policy.idle_bytes = policy.ledger.sample() if policy.ledger else 0
        words = ", ".join(
            f"{name} {getattr(policy.settings, name)!r} -> {getattr(settings, name)!r}" for name in changed
        )
        print(f"the same engine with a fresh adapter, untrained: {words}")
    else:
        print("already loaded: the same policy, its adapter as it is")
    policy.settings = settings
    return policy


def unload() -> int:
    """End the engine and free the card. Returns the bytes that the driver says came free, and prints them.

    The policy that `load` returned can't be used afterwards, whoever holds it. Where a part of the engine's memory
    stays taken, it prints that the runtime must be restarted.
    """
    global _loaded
    if _loaded is None:
        print("nothing is loaded")
        return 0
    import gc

    policy, _loaded = _loaded, None
    engine, gpu = policy.engine, policy.device.type == "cuda"
    if policy.host_store is not None:
        policy.host_store.close()
    before = engine.free_bytes()
    with contextlib.suppress(Exception):
        policy.standby.wake()  # vLLM's allocator can only give back what is mapped
    policy.__dict__.clear()
    engine.shut_down()
    del engine
    gc.collect()
    if not gpu:
        print("unloaded; load starts a new engine")
        return 0
    import torch
    from vllm.device_allocator.cumem import CuMemAllocator

    torch.cuda.empty_cache()
    freed, kept = torch.cuda.mem_get_info()[0] - before, CuMemAllocator.get_instance().get_current_usage()
    print(f"unloaded; the driver says {freed / 2**30:.2f} GiB came free")
    if kept:
        print(f"{kept / 2**30:.2f} GiB of the engine are still held, so no other can start: restart the runtime")
    return freed


AGAIN = "call kit.unload() and run the cell again; if that can't free the card, restart the runtime"


def check_same_engine(policy: Policy, wanted: Settings) -> None:
    """Raises ValueError for settings that only another engine could honour."""
    started = policy.engine.settings
    for name in ENGINE_FIELDS:
        if getattr(started, name) != getattr(wanted, name):
            raise ValueError(
                f"{name}={getattr(wanted, name)!r}, but the engine was started with {getattr(started, name)!r}: {AGAIN}"
            )
    if wanted.max_model_length > started.max_model_length:
        raise ValueError(
            f"vllm_max_model_length: {wanted.max_model_length} tokens a sequence are asked for, the engine was started "
            f"for {started.max_model_length}: {AGAIN}"
        )


def check_same_adapter(policy: Policy, wanted: Settings) -> None:
    """Raises ValueError for settings that need another adapter."""
    for name in LORA_FIELDS:
        if getattr(policy.settings, name) != getattr(wanted, name):
            raise ValueError(
                f"{name}={getattr(wanted, name)!r}, but the policy has {getattr(policy.settings, name)!r}: call load "
                f"again with these settings; the engine stays, the adapter is a fresh one"
            )
