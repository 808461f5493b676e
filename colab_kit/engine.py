"""The in-process vLLM engine: start, generate, drain, release.

Departures from vLLM's defaults, each for a reason:
- in this process (no worker process), so that the trainer can hold views of its weights;
- two layers of the kit's own (`vllm_layers.py`): for bitsandbytes weights, and for LoRA;
- log-probabilities `processed`: temperature applied, so that the on-policy ratio is 1 at any temperature;
- full CUDA graphs for decoding without torch.compile: starts in a third of the time and decodes as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from .interrupts import uninterrupted
from .optimizer import preserved_rng
from .planning import MAX_NUM_BATCHED_TOKENS, sequences, slot_rank
from .presets import LINEAR_MODULES, Settings
from .products import Products
from .standby import prepare_environment, standby_requested
from .training_pass import kv_bytes_per_token
from .vllm_layers import install_layers


@dataclasses.dataclass
class Completion:
    """One sampled completion."""

    token_ids: list[int]
    """ends with the end-of-sequence token where the model stopped by itself"""
    logprobs: list[float]
    """the sampler's, one a token, temperature and cuts applied"""
    text: str
    finish_reason: str
    """"stop", or "length" where max_completion_length cut it"""


class Engine:
    """A running vLLM engine and what the kit needs of it. One a process."""

    def __init__(self, llm: Any, settings: Settings, device: str, products: Products) -> None:
        self.llm, self.settings, self.device, self.products = llm, settings, device, products
        self.dtype = llm.llm_engine.model_config.dtype
        self.core = llm.llm_engine.engine_core.engine_core
        self.can_release = device == "cuda" and standby_requested()

    @classmethod
    def start(cls, model: str, settings: Settings, choice: Any, **overrides: Any):
        """Start vLLM on a local model folder, with the dtype and the KV cache that the plan chose."""
        prepare_environment()
        with real_file_descriptors():
            from vllm import LLM
            from vllm.plugins import load_general_plugins

            device = "cuda" if torch.cuda.is_available() else "cpu"
            load_general_plugins()  # the bitsandbytes plugin registers itself here; ours goes on top
            products = Products(settings.nf4_kernel)
            install_layers(products)
            if settings.load_in_4bit:
                products.expect(getattr(torch, choice.dtype))
            # vLLM seeds the global generators when it lives in this process; the user's own must not change.
            # Not held by a name: an import that failed in here keeps this frame, which would keep the engine.
            with preserved_rng():
                engine = cls(
                    LLM(
                        model=model,
                        dtype=choice.dtype,
                        quantization="bitsandbytes" if settings.load_in_4bit else None,
                        max_model_len=settings.max_model_length,
                        max_num_seqs=sequences(settings),
                        enable_lora=True,
                        max_loras=1,
                        max_lora_rank=slot_rank(settings, device == "cuda"),
                        lora_target_modules=list(LINEAR_MODULES),  # or vLLM looks for one at the embedding, too
                        enable_prefix_caching=True,
                        enable_sleep_mode=device == "cuda" and standby_requested(),
                        logprobs_mode="processed_logprobs",
                        kv_cache_memory_bytes=choice.kv_cache_bytes,
                        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                        seed=settings.seed,
                        disable_log_stats=True,
                        **(device_arguments(settings, device) | overrides),
                    ),
                    settings,
                    device,
                    products,
                )
            if device == "cuda":
                use_expandable_segments()
            return engine

    @property
    def model(self):
        """vLLM's own module, whose parameters are the only copy of the weights."""
        return self._runner.get_model()

    @property
    def _runner(self):
        return self.core.model_executor.driver_worker.model_runner

    @property
    def lora_manager(self):
        return self._runner.lora_manager._adapter_manager

    @property
    def slot_matrices(self) -> list[torch.Tensor]:
        """Every layer's A and B of the adapter in the sampler."""
        return [x for m in self.lora_manager.modules.values() for x in (*m.lora_a_stacked, *m.lora_b_stacked)]

    @property
    def max_lora_rank(self) -> int:
        return self.core.vllm_config.lora_config.max_lora_rank

    def shut_down(self) -> None:
        """End the engine and let go of its memory; it can't be used afterwards."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.synchronize()
        self.llm.llm_engine.engine_core.shutdown()
        self.__dict__.clear()
        cleanup_dist_env_and_memory()

    # --- generating ---------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: list[list[int]],
        *,
        n: int = 1,
        seed: int | None = None,
        lora_request: Any = None,
        progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> list[list[Completion]]:
        """`n` completions for each prompt. Sampling settings are the run's unless given (`temperature=0`: greedy).

        `progress(done, total)` is called from this thread as completions finish. An interrupt leaves the engine idle.
        Raises: FloatingPointError where a log-probability is not finite.
        """
        from vllm import SamplingParams

        # Else vLLM puts each token and its log-probability into words as it comes: 1.5 ms a step for 64 sequences.
        words = {"detokenize": bool(sampling.get("stop"))}
        parameters = words | sampling_arguments(self.settings) | sampling
        if parameters["temperature"] == 0 and n > 1:
            raise ValueError(f"temperature=0 is greedy: every completion is the same, so n must be 1; got {n}")
        # A seed for each prompt, n apart, so that a prompt that occurs twice does not get the same completions twice.
        params = [
            SamplingParams(n=n, seed=None if seed is None else seed + i * n, logprobs=0, **parameters)
            for i in range(len(prompt_ids))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        # On a CPU vLLM compiles a few tiny functions at first use, which takes seconds and a C++ compiler.
        eager = torch.compiler.set_stance("force_eager") if self.device == "cpu" else contextlib.nullcontext()
        engine, outputs = self.llm.llm_engine, []
        try:
            with eager:
                with uninterrupted():  # a scheduler that stopped half-way could not be made idle again
                    self.llm.enqueue(prompts, params, lora_request=lora_request, use_tqdm=False)
                while engine.has_unfinished_requests():
                    with uninterrupted():
                        outputs += engine.step()
                    if progress:
                        unfinished = len(engine.output_processor.request_states)
                        progress(n * len(prompts) - unfinished, n * len(prompts))
        except BaseException:
            self.abort()
            raise
        outputs.sort(key=lambda output: int(output.request_id))  # vLLM numbers them as they were queued
        tokenizer = None if parameters["detokenize"] else self.llm.get_tokenizer()
        found = [[_completion(sample, tokenizer) for sample in output.outputs] for output in outputs]
        if not all(math.isfinite(sum(completion.logprobs)) for group in found for completion in group):
            for cache in self._runner.kv_caches:
                cache.zero_()  # a CPU's attention multiplies what it masks by zero, and NaN would stay NaN
            why = 'a kernel gives it here (kit.preflight("t4", deep=True) says which part fails)'
            if not all(matrix.isfinite().all() for matrix in self.slot_matrices):
                why = "so is the adapter: go back to a checkpoint from before it (`load_adapter`)"
            raise FloatingPointError(f"vLLM's log-probabilities are not finite, {why}")
        return found

    @uninterrupted()
    def abort(self) -> None:
        """Drop whatever is still being generated."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        engine.output_processor.parent_requests.clear()
        self.drain()

    # --- standby ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Pause scheduling and step until nothing is queued: after `generate` returns, finished ids and, with
        asynchronous scheduling, one speculative batch still are."""
        self.llm.sleep(level=0)
        for _ in range(100):
            if not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            self.llm.llm_engine.step()
        raise RuntimeError("the engine did not become idle")

    def resume(self) -> None:
        self.llm.wake_up(tags=["scheduling"])

    def release_kv_cache(self) -> None:
        self.llm.release_kv_cache_memory()

    def give_back_cached_blocks(self) -> None:
        """What torch's allocator keeps of the trainer's memory is the KV cache's when it wakes."""
        torch.cuda.empty_cache()

    def restore_kv_cache(self) -> None:
        # vLLM collects garbage here, 250 ms over all the objects that torch and vLLM have made; nothing of the trainer
        # hangs in a cycle, so for this call the collector is given nothing to walk.
        gc.freeze()
        try:
            self.llm.wake_up(tags=["kv_cache"])
        finally:
            gc.unfreeze()

    def reset_prefix_cache(self) -> None:
        """After the weights changed, cached keys and values are another model's."""
        self.llm.reset_prefix_cache()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """The driver's free memory; torch's own counters still count a released KV cache."""
        if self.device != "cuda":
            return 0
        return torch.cuda.mem_get_info()[0]

    @property
    def kv_cache_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self.core.scheduler.kv_cache_config.num_blocks * self.core.vllm_config.cache_config.block_size

    @property
    def kv_cache_bytes(self) -> int:
        config = self.core.vllm_config
        return self.kv_cache_tokens * kv_bytes_per_token(config.model_config.hf_config, self.dtype.itemsize)


def sampling_arguments(s: Settings) -> dict[str, Any]:
    return dict(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p or 0.0,
        repetition_penalty=s.repetition_penalty, max_tokens=s.max_completion_length,
    )  # fmt: skip


def device_arguments(settings: Settings, device: str) -> dict[str, Any]:
    """Eager on a CPU; on a GPU CUDA graphs of the whole decoding step, no torch.compile."""
    eager = settings.enforce_eager if settings.enforce_eager is not None else device != "cuda"
    arguments: dict[str, Any] = {"enforce_eager": eager}
    if device == "cuda":
        arguments["gpu_memory_utilization"] = 0.01  # only checked against what is free: the plan sizes the KV cache
    if device == "cuda" and not eager:
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if settings.vllm_attention_backend:
        arguments["attention_config"] = {"backend": settings.vllm_attention_backend}
    return arguments


def use_expandable_segments() -> None:
    """From here on torch's allocator grows segments in place of adding new ones: a training pass over a long sequence
    otherwise leaves gigabytes of gaps. Not by the environment variable, so that vLLM's pools are made without it."""
    from vllm.device_allocator import alloc_conf

    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(alloc_conf.current_alloc_conf(), "expandable_segments", True))


@contextlib.contextmanager
def real_file_descriptors():
    """vLLM asks `sys.stdout.fileno()` while starting; a notebook's stdout has none to give."""
    with contextlib.ExitStack() as stack:
        try:
            sys.stdout.fileno()
        except (AttributeError, OSError, ValueError):
            process_stdout = stack.enter_context(open(1, "w", closefd=False))
            stack.enter_context(contextlib.redirect_stdout(process_stdout))
        yield  # outside the try: an error of the start itself must pass unchanged


def _completion(sample: Any, tokenizer: Any) -> Completion:
    ids, text, reason = list(sample.token_ids), sample.text, sample.finish_reason
    logprobs = [step[token].logprob for token, step in zip(ids, sample.logprobs, strict=True)]
    if tokenizer:  # without the token that ended it
        words = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text = tokenizer.decode(ids[:-1] if reason == "stop" else ids, **words)
    return Completion(ids, logprobs, text, reason)
