"""GRPO, readable as the algorithm.

Where it departs from textbook GRPO (https://huggingface.co/papers/2402.03300), TRL's defaults are followed: the loss is
averaged over the step's tokens (dapo), there is no KL term (beta = 0), and the sampler's log-probabilities correct for
vLLM's arithmetic differing from the trainer's. Where it departs from TRL: denominators are the whole step's, so how a
batch is cut never shows in the result; sequences are packed without padding; and the engine, whose weights are the
trainer's, sleeps while the trainer works.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from . import grpo
from .dashboard import Dashboard, Report
from .data import Prompts, prepare_prompts
from .engine import Completion
from .long_context import hidden_states, micro_batches, use_packed_attention
from .memory import GIB, choose_devices, explain_oom, savings
from .policy import Policy, Samples
from .presets import Settings
from .rewards import score, validate_reward_funcs


def train(
    policy: Policy,
    dataset: Iterable[dict[str, Any]],
    rewards: Callable | Sequence[Callable],
    settings: Settings | None = None,
    *,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train `policy` on `dataset` by GRPO with `rewards`, showing the live dashboard. Returns the finished `Run`.

    `dataset`: rows with a `prompt` (text or messages); other columns go to the rewards. `rewards`: TRL's contract,
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`. `callbacks`: transformers'
    `TrainerCallback`s. All of it is checked before the first step.
    """
    return Trainer(policy, dataset, rewards, settings or policy.settings, callbacks).run()


@dataclasses.dataclass
class Rollout:
    """The completions of one step, `num_generations` in a row for each prompt; lists have one entry a completion."""

    prompts: list[Any]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def lengths(self) -> list[int]:
        return [len(completion.token_ids) for completion in self.completions]


class Trainer:
    """One run: what `train` makes and runs."""

    def __init__(self, policy: Policy, dataset, rewards, settings: Settings, callbacks: Sequence[Any] = ()) -> None:
        self.policy, self.settings = policy, settings
        check_same_engine(policy.settings, settings)
        self.reward_funcs = validate_reward_funcs(rewards, settings)
        self.prompts: Prompts = prepare_prompts(dataset, policy.tokenizer, settings)
        self.model, self.device = policy.model, policy.device
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, settings, self.device)
        from transformers import get_scheduler

        self.scheduler = get_scheduler(
            settings.lr_scheduler_type, self.optimizer, settings.warmup_steps, settings.max_steps
        )
        # float16 gradients underflow without a scale; its optimizer step is skipped when one is infinite.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=policy.engine.dtype == torch.float16)
        self.max_tokens, self.devices, self.host_store = choose_devices(policy, settings)
        use_packed_attention(self.model.get_base_model())
        self.report = Report(
            dataclasses.asdict(settings), settings.output_dir, settings.max_steps, reward_names=self._reward_names()
        )
        self.callbacks = Callbacks(self, callbacks)
        self.warned, self.longest, self.began = False, 0, time.monotonic()

    # --- the algorithm ------------------------------------------------------------------------------

    def run(self) -> Run:
        if self.policy.ledger:
            self.policy.ledger.forget()
        with Dashboard(self.report) as self.dashboard, self.callbacks:
            for step in range(self.settings.max_steps):
                start = time.perf_counter()
                metrics = self.step(step) | self.memory_metrics()
                metrics["step_time"] = time.perf_counter() - start
                self.dashboard.step(step + 1, metrics)
                if self.callbacks.step_end(step + 1, metrics):
                    break
        return Run(self.policy, self.report, self.settings)

    def step(self, step: int) -> dict[str, float]:
        """Generate, sleep, score, train, sync. Returns the step's metrics under TRL's names."""
        self.seconds: dict[str, float] = {}
        with self.phase("generating"):
            rollout = self.generate(step)  # the engine is awake only in here
        with self.phase("scoring"):
            scores = self.score(rollout)
            rewards = torch.tensor([[float("nan") if r is None else r for r in row] for row in scores.rows])
            advantages = grpo.group_advantages(rewards, self.settings, scores.names)
            self.show(rollout, scores, advantages)
        with self.phase("training"):
            metrics = self.optimize(rollout, advantages.advantages)
        with self.phase("syncing"):
            self.policy.sync()
        return metrics | advantages.metrics | scores.metrics | self.seconds

    def generate(self, step: int) -> Rollout:
        rows, s = self.prompts.indices(step), self.settings
        with self.policy.standby.awake():
            groups = self.policy.engine.generate(
                [self.prompts.prompt_ids[row] for row in rows],
                n=s.num_generations,
                # Far apart, so that no two steps share a seed; a function of the step, so that a resumed run goes on.
                seed=(s.seed << 32) + (step << 12),
                lora_request=self.policy.slot.request,
                progress=lambda done, total: self.dashboard.progress(done, total, "completions"),
                **sampling_arguments(s),
            )
        repeated = [row for row in rows for _ in range(s.num_generations)]
        return Rollout(
            [self.prompts.rows[row]["prompt"] for row in repeated],
            [self.prompts.prompt_ids[row] for row in repeated],
            [completion for group in groups for completion in group],
            self.prompts.reward_columns(rows, s.num_generations),
        )

    def score(self, rollout: Rollout):
        completions = [
            completion.text if isinstance(prompt, str) else [{"role": "assistant", "content": completion.text}]
            for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
        ]
        ids = [completion.token_ids for completion in rollout.completions]
        return score(
            self.reward_funcs, rollout.prompts, completions, ids, rollout.columns, trainer_state=self.callbacks.state
        )

    def optimize(self, rollout: Rollout, advantages: torch.Tensor) -> dict[str, float]:
        """`num_iterations` optimizer steps on one rollout, each over all its micro-batches."""
        s, lengths = self.settings, rollout.lengths
        is_truncated = grpo.truncated([completion.finish_reason for completion in rollout.completions])
        totals = grpo.StepTotals.from_lengths(lengths, is_truncated, s)
        sizes = [len(prompt) + length for prompt, length in zip(rollout.prompt_ids, lengths, strict=True)]
        batches, self.longest = micro_batches(sizes, self.max_tokens), max(sizes)
        kept: dict[int, tuple] = {}  # old log-probs and sampler ratio of each micro-batch, from the first iteration
        self.model.train()
        for iteration in range(s.num_iterations):
            parts, loss_sum = [], 0.0
            for i, batch in enumerate(batches):
                self.dashboard.progress(i + iteration * len(batches), len(batches) * s.num_iterations, "micro-batches")
                sampled = [torch.tensor(rollout.completions[j].logprobs) for j in batch]
                sampler_logps, mask = (x.to(self.device) for x in grpo.pad(sampled))
                mask = grpo.loss_mask(mask, is_truncated[batch], s)
                ref_logps = self.reference_logps(rollout, batch) if s.beta else None
                logps, entropy = self.logps(rollout, batch)
                if iteration == 0:
                    ratio, sampling = self.sampling_ratio(logps.detach(), sampler_logps, mask)
                    parts.append(sampling)
                    kept[i] = (logps.detach() if s.num_iterations > 1 else None, ratio)
                old_logps, ratio = kept[i]
                loss, part = grpo.policy_loss(
                    logps, advantages[batch].to(self.device), mask, settings=s, totals=totals,
                    # on policy the ratio is exactly 1: no forward pass of its own
                    old_logps=old_logps if iteration else None,
                    ref_logps=ref_logps, sampling_ratio=ratio, entropy=entropy,
                )  # fmt: skip
                self.scaler.scale(loss).backward()
                loss_sum += loss.detach()
                parts.append(part)
            step_metrics = self.optimizer_step()
        metrics = grpo.finalize_metrics(grpo.combine_metrics(*parts))
        self.warn_of_cuts(metrics.pop("sampling_logp_gap", 0.0))
        metrics |= grpo.completion_metrics(lengths, is_truncated) | step_metrics
        return metrics | {"loss": float(loss_sum), "num_tokens": float(sum(sizes))}

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule. An infinite gradient (float16) skips the step and says so."""
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm).item()
        learning_rate = self.scheduler.get_last_lr()[0]
        finite = norm == norm and norm != float("inf")
        if finite:
            self.scaler.step(self.optimizer)
            self.scheduler.step()
        else:
            print(f"An infinite gradient: this optimizer step is skipped (loss scale {self.scaler.get_scale():g}).")
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        shown = norm if finite else float("nan")
        return {"grad_norm": shown, "learning_rate": learning_rate, "skipped_steps": float(not finite)}

    # --- log-probabilities --------------------------------------------------------------------------

    def logps(self, rollout: Rollout, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T] log-probabilities of the batch's completions at the sampling temperature, and entropies."""
        sequences = [rollout.prompt_ids[j] + rollout.completions[j].token_ids for j in batch]
        base = self.model.get_base_model()
        states, targets, start = [], [], 0
        with self.autocast():
            hidden = hidden_states(base.model, sequences, self.devices, self.host_store)
            for j, sequence in zip(batch, sequences, strict=True):
                ids = torch.tensor(sequence, device=self.device)
                h, t = grpo.completion_targets(hidden[start : start + len(ids)], ids, len(rollout.prompt_ids[j]))
                states.append(h)
                targets.append(t)
                start += len(ids)
            states = base.model.norm(torch.cat(states))  # only the rows that predict something
        logps, entropy = grpo.chunked_logprobs(
            states, base.lm_head.weight, torch.cat(targets),
            temperature=self.settings.temperature, chunk_size=self.settings.logprob_chunk_size,
        )  # fmt: skip
        lengths = [len(t) for t in targets]
        return grpo.pad(logps.split(lengths))[0], grpo.pad(entropy.split(lengths))[0]

    def reference_logps(self, rollout: Rollout, batch: list[int]) -> torch.Tensor:
        """The base model's, by switching the adapter off: no second copy."""
        with torch.no_grad(), self.model.disable_adapter():
            return self.logps(rollout, batch)[0]

    def sampling_ratio(self, logps, sampler_logps, mask):
        ratio, metrics = grpo.sampling_ratio(logps, sampler_logps, mask, self.settings)
        return (ratio if self.settings.vllm_importance_sampling_correction else None), metrics

    def autocast(self):
        """LoRA's float32 masters compute in the engine's dtype on a GPU; float32 needs nothing."""
        dtype = self.policy.engine.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)

    # --- what people see ----------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str):
        self.dashboard.phase(name)
        ledger, start = self.policy.ledger, time.perf_counter()
        if ledger:
            ledger.enter(name)
        try:
            yield
        except torch.OutOfMemoryError as error:
            free = self.policy.engine.free_bytes()
            self.optimizer.zero_grad(set_to_none=True)
            # Raised from None: the traceback holds the tensors that did not fit.
            raise explain_oom(error, name, free, self.settings, self.longest) from None
        self.seconds[f"time/{name}"] = time.perf_counter() - start

    def memory_metrics(self) -> dict[str, float]:
        """GiB by the driver, for this process; and the card for the dashboard. Empty on a CPU."""
        ledger, standby = self.policy.ledger, self.policy.standby
        if not ledger:
            return {}
        idle, peaks, kv = ledger.sample(), ledger.peaks, standby.kv_cache_bytes
        training = max(peaks.get("training", 0) - self.policy.idle_bytes, 0)
        parts = {"weights": self.policy.weight_bytes, "kv_cache": kv, "training": training}
        parts["other"] = max(self.policy.idle_bytes - parts["weights"] - (0 if standby.enabled else kv), 0)
        self.dashboard.memory(
            {name: value / GIB for name, value in parts.items()},
            free_gib=(ledger.driver.total - ledger.driver.used()) / GIB, total_gib=ledger.driver.total / GIB,
        )  # fmt: skip
        for moment, used, phase in list(ledger.samples)[-300:]:
            self.report.memory_sample(moment - self.began, used / GIB, phase)
        self.report.savings = savings(peaks, kv, standby.enabled) or self.report.savings
        return {
            "memory/peak_gib": max(peaks.values()) / GIB, "memory/asleep_gib": peaks.get("training", 0) / GIB,
            "memory/awake_gib": peaks.get("generating", 0) / GIB, "memory/idle_gib": idle / GIB,
            "memory/kv_cache_gib": kv / GIB, "memory/freed_gib": standby.freed_bytes / GIB,
        }  # fmt: skip

    def show(self, rollout: Rollout, scores, advantages) -> None:
        """The step's first prompt, with its completions, to the dashboard."""
        if not self.settings.log_completions:
            return
        rows = []
        for j in range(self.settings.num_generations):
            reward = advantages.rewards[j].item()
            rows.append(
                {
                    "completion": rollout.completions[j].text,
                    "reward": reward if reward == reward else None,
                    "advantage": advantages.advantages[j].item(),
                    "rewards": dict(zip(scores.names, scores.rows[j], strict=True)),
                }
            )
        prompt = rollout.prompts[0]
        self.dashboard.completions(prompt if isinstance(prompt, str) else prompt[-1]["content"], rows)

    def warn_of_cuts(self, gap: float) -> None:
        warning = grpo.kept_support_warning(self.settings, gap)
        if warning and not self.warned:
            print(warning)
            self.warned = True

    def _reward_names(self) -> list[str]:
        from .rewards import reward_name

        return [reward_name(func) for func in self.reward_funcs]


class Run:
    """A finished run: its figures and what changed."""

    def __init__(self, policy: Policy, report: Report, settings: Settings) -> None:
        self.policy, self.report, self.settings = policy, report, settings

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step, under TRL's names."""
        return self.report.steps

    def compare(self, before: Samples) -> Comparison:
        """The same prompts, sampled the same way, before and after."""
        after = self.policy.sample(before.rows, **before.sampling)
        return Comparison(before, after)

    def reward_trend(self) -> str:
        """Mean reward of the first and last fifth of the steps, in words."""
        first, last = fifths([step["reward"] for step in self.metrics])
        return f"mean reward of the first fifth of the steps {first:.3f}, of the last fifth {last:.3f}"


class Comparison(Samples):
    """Completions before and after, side by side."""

    def __init__(self, before: Samples, after: Samples) -> None:
        super().__init__(before.rows, after.completions, after.sampling)
        self.before = before

    @property
    def columns(self) -> dict[str, list[str]]:
        columns = super().columns
        return {
            "prompt": columns["prompt"],
            "before": self.before.columns["completion"],
            "after": columns["completion"],
        }


def fifths(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last fifth (at least one value)."""
    size = max(len(values) // 5, 1)
    return sum(values[:size]) / size, sum(values[-size:]) / size


class Callbacks:
    """transformers' callbacks and `report_to` integrations, driven at their usual moments."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Any]) -> None:
        from transformers import TrainerControl, TrainerState

        s = trainer.settings
        self.state, self.control = TrainerState(max_steps=s.max_steps), TrainerControl()
        self.handler = self.args = None
        if callbacks or s.report_to:
            from transformers import TrainingArguments
            from transformers.integrations import get_reporting_integration_callbacks
            from transformers.trainer_callback import CallbackHandler

            self.args = TrainingArguments(
                output_dir=s.output_dir, max_steps=s.max_steps, learning_rate=s.learning_rate, seed=s.seed,
                per_device_train_batch_size=s.per_device_train_batch_size, report_to=list(s.report_to) or "none",
                gradient_accumulation_steps=s.gradient_accumulation_steps, use_cpu=trainer.device.type == "cpu",
            )  # fmt: skip
            reports = get_reporting_integration_callbacks(list(s.report_to)) if s.report_to else []
            self.handler = CallbackHandler(
                [*reports, *callbacks], trainer.model, trainer.policy.tokenizer, trainer.optimizer, trainer.scheduler
            )

    def __enter__(self) -> Callbacks:
        if self.handler:
            self.control = self.handler.on_train_begin(self.args, self.state, self.control)
        return self

    def step_end(self, step: int, metrics: dict[str, float]) -> bool:
        """After a step; whether a callback asked to stop."""
        self.state.global_step = step
        self.state.log_history.append(metrics | {"step": step})
        if self.handler:
            self.control = self.handler.on_step_end(self.args, self.state, self.control)
            self.control = self.handler.on_log(self.args, self.state, self.control, metrics)
        return self.control.should_training_stop

    def __exit__(self, *_: Any) -> None:
        if self.handler:
            self.control = self.handler.on_train_end(self.args, self.state, self.control)


def sampling_arguments(s: Settings) -> dict[str, Any]:
    return dict(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p or 0.0,
        repetition_penalty=s.repetition_penalty, max_tokens=s.max_completion_length,
    )  # fmt: skip


def make_optimizer(parameters: list[torch.nn.Parameter], s: Settings, device: torch.device):
    """AdamW: torch's on a CPU; bitsandbytes' 8-bit on a GPU, whose states take a quarter of the memory."""
    kwargs = dict(
        lr=s.learning_rate, betas=(s.adam_beta1, s.adam_beta2), eps=s.adam_epsilon, weight_decay=s.weight_decay
    )
    name = s.optim if s.optim != "auto" else "adamw_torch" if device.type == "cpu" else "adamw_8bit"
    if name == "adamw_torch":
        return torch.optim.AdamW(parameters, **kwargs)
    import bitsandbytes as bnb

    make = bnb.optim.PagedAdamW8bit if name == "paged_adamw_8bit" else bnb.optim.AdamW8bit
    return make(parameters, **kwargs)


ENGINE_FIELDS = (
    "model_name_or_path", "load_in_4bit", "dtype", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
    "vllm_gpu_memory_utilization", "vllm_attention_backend", "enforce_eager",
)  # fmt: skip


def check_same_engine(loaded: Settings, wanted: Settings) -> None:
    """Raises ValueError for settings that only a new load could honour."""
    for name in ENGINE_FIELDS:
        if getattr(loaded, name) != getattr(wanted, name):
            raise ValueError(
                f"{name}={getattr(wanted, name)!r}, but the policy was loaded with {getattr(loaded, name)!r}: call "
                f"load again with these settings in a fresh kernel"
            )
    if wanted.max_model_length > loaded.max_model_length:
        raise ValueError(
            f"vllm_max_model_length: {wanted.max_model_length} tokens a sequence are asked for, the engine was loaded "
            f"for {loaded.max_model_length}"
        )


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
