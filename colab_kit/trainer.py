"""GRPO, readable as the algorithm.

Where it departs from textbook GRPO (https://huggingface.co/papers/2402.03300), TRL's defaults are followed: the loss is
averaged over the step's tokens (dapo), there is no KL term (beta = 0), and the sampler's log-probabilities correct for
vLLM's arithmetic differing from the trainer's. Where it departs from TRL: denominators are the whole step's, so how a
batch is cut never shows in the result; sequences are packed without padding; and the engine, whose weights are the
trainer's, sleeps while the trainer works.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from . import checkpoint, grpo
from .dashboard import Dashboard
from .data import Prompts, prepare_prompts
from .engine import Completion, sampling_arguments
from .interrupts import uninterrupted
from .long_context import choose_pass, hidden_states, micro_batches, prepare_model
from .memory import explain_oom
from .optimizer import make_optimizer, make_scheduler, rng_state
from .policy import Policy, check_same_adapter, check_same_engine
from .presets import Settings
from .rewards import reward_name, score, validate_reward_funcs
from .run import Callbacks, Run, RunMemory, resumed_report, show_completions
from .saves import Checkpoints, Rescue, forget_frames, release_memory


def train(
    policy: Policy,
    dataset: Iterable[dict[str, Any]],
    rewards: Callable | Sequence[Callable],
    settings: Settings | None = None,
    *,
    resume: bool | str | Path = False,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train `policy` on `dataset` by GRPO with `rewards`, showing the live dashboard. Returns the finished `Run`.

    `dataset`: rows with a `prompt` (text or messages); other columns go to the rewards. `rewards`: TRL's contract,
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`. `callbacks`: transformers'
    `TrainerCallback`s. All of it is checked before the first step.

    `resume`: go on from the newest whole checkpoint in `output_dir` (True), or from a folder. Steps, prompts, seeds,
    learning rate and figures go on as if nothing had happened.

    The stop button (KeyboardInterrupt) ends the run cleanly: the last whole step is saved, the engine sleeps, and the
    `Run` so far is returned, its `status` "interrupted". After an error the same is done, and the error passed on.
    """
    try:
        return Trainer(policy, dataset, rewards, settings or policy.settings, callbacks, resume).run()
    except BaseException as error:
        forget_frames(error)
        raise
    finally:
        release_memory(policy)


@dataclasses.dataclass
class Rollout:
    """The completions of one step, `num_generations` in a row for each prompt; lists have one entry a completion."""

    prompts: list[Any]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    columns: dict[str, list[Any]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(completion.token_ids) for completion in self.completions]


class Trainer:
    """One run: what `train` makes and runs."""

    def __init__(
        self, policy: Policy, dataset, rewards, settings: Settings, callbacks: Sequence[Any] = (), resume: Any = False
    ) -> None:
        self.policy, self.settings = policy, settings
        check_same_engine(policy, settings)
        check_same_adapter(policy, settings)
        self.reward_funcs = validate_reward_funcs(rewards, settings)
        self.prompts: Prompts = prepare_prompts(dataset, policy.tokenizer, settings)
        self.model, self.device = policy.model, policy.device
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.optimizer = make_optimizer(self.parameters, settings, self.device)
        self.scheduler = make_scheduler(self.optimizer, settings)
        # float16 gradients underflow without a scale; its optimizer step is skipped when one is infinite.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=policy.engine.dtype == torch.float16)
        self.max_tokens, self.devices, self.host_store, self.pass_bytes = choose_pass(policy, settings)
        prepare_model(self.model.get_base_model())
        self.warned, self.longest, self.steps_done, self.half_done = False, 0, 0, False
        set_seed(settings.seed)  # dropout, and whatever the reward functions draw
        self.rng = rng_state()
        resumed = checkpoint.find(resume, settings.output_dir) if resume else None
        if resumed:
            checkpoint.check_settings(resumed, settings, self.prompts, self.optimizer)
            checkpoint.restore(self, resumed)
        self.checkpoints = Checkpoints(self, resumed)
        self.report = resumed_report(settings, [reward_name(func) for func in self.reward_funcs], resumed)
        self.callbacks = Callbacks(self, callbacks)
        self.enter = policy.ledger.enter if policy.ledger else lambda phase: None

    # --- the algorithm ------------------------------------------------------------------------------

    def run(self) -> Run:
        self.memory = RunMemory(self.policy, self.report, self.pass_bytes)
        with Rescue(self) as self.rescue, Dashboard(self.report) as self.dashboard, self.callbacks:
            self.policy.sync()
            for step in range(self.steps_done, self.settings.max_steps):
                start = time.perf_counter()
                with ExitStack() as self.whole_step:
                    metrics = self.step(step) | self.memory.record(self.dashboard)
                    self.end_step(step + 1, metrics | {"step_time": time.perf_counter() - start})
                wishes = self.callbacks.step_end(step + 1, metrics)
                self.checkpoints.save_if_due(wishes.should_save)
                if wishes.should_training_stop:
                    break
        return Run(self.policy, self.report, self.settings, self.devices)

    def step(self, step: int) -> dict[str, float]:
        """Generate, sleep, score, train, sync. Returns the step's metrics under TRL's names."""
        self.seconds: dict[str, float] = {}
        with self.phase("generating"):
            rollout = self.generate(step)  # the engine is awake only in here
        with self.phase("scoring"):
            scores = self.score(rollout)
            rewards = torch.tensor([[float("nan") if r is None else r for r in row] for row in scores.rows])
            advantages = grpo.group_advantages(rewards, self.settings, scores.names)
            if self.settings.log_completions:
                show_completions(self.dashboard, rollout, scores, advantages, self.settings.num_generations)
        with self.phase("training"):
            metrics = self.optimize(rollout, advantages.advantages)
        with self.phase("syncing"):
            self.policy.sync()
        return metrics | advantages.metrics | scores.metrics | self.seconds

    def generate(self, step: int) -> Rollout:
        rows, s = self.prompts.indices(step), self.settings
        with self.policy.standby.awake():
            self.enter("generating")  # what the card held until now was the trainer's
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
        ids, state = [completion.token_ids for completion in rollout.completions], self.callbacks.state
        return score(self.reward_funcs, rollout.prompts, completions, ids, rollout.columns, trainer_state=state)

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
                    ratio, sampling = grpo.sampling_ratio(logps.detach(), sampler_logps, mask, s)
                    parts.append(sampling)
                    kept[i] = (
                        logps.detach() if s.num_iterations > 1 else None,
                        ratio if s.vllm_importance_sampling_correction else None,
                    )
                old_logps, ratio = kept[i]
                loss, part = grpo.policy_loss(
                    logps, advantages[batch].to(self.device), mask, settings=s, totals=totals,
                    old_logps=old_logps if iteration else None,  # on policy the ratio is 1: no pass of its own
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
        if not self.half_done:  # from here to the end of the step an interrupt waits: a checkpoint is of whole steps
            self.whole_step.enter_context(uninterrupted("finishing the step first: its update has begun"))
            self.half_done = True
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm).item()
        learning_rate = self.scheduler.get_last_lr()[0]
        finite = math.isfinite(norm)
        if finite:
            self.scaler.step(self.optimizer)
            self.scheduler.step()
        else:
            print(f"An infinite gradient: this optimizer step is skipped (loss scale {self.scaler.get_scale():g}).")
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm if finite else math.nan,
            "learning_rate": learning_rate,
            "skipped_steps": float(not finite),
        }

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        """The step is whole: its figures are kept, and a checkpoint may be made of it."""
        self.dashboard.step(step, metrics)
        self.rng = rng_state()
        self.steps_done, self.half_done = step, False
        self.rescue.again()

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

    def autocast(self):
        """LoRA's float32 masters compute in the engine's dtype."""
        dtype = self.policy.engine.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    # --- what people see ----------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str):
        self.dashboard.phase(name)
        start = time.perf_counter()
        self.enter("waking" if name == "generating" else name)
        try:
            yield
        except torch.OutOfMemoryError as error:
            free = self.policy.engine.free_bytes()
            self.optimizer.zero_grad(set_to_none=True)
            # Raised from None: the traceback holds the tensors that did not fit.
            raise explain_oom(error, name, free, self.settings, self.longest) from None
        self.seconds[f"time/{name}"] = time.perf_counter() - start

    def warn_of_cuts(self, gap: float) -> None:
        if not self.warned and (warning := grpo.kept_support_warning(self.settings, gap)):
            print(warning)
            self.warned = True
