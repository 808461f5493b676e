"""A run as people see it: its figures, what changed, and the callbacks that went along."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .dashboard import Dashboard, Report
from .memory import GIB, savings
from .policy import Policy
from .presets import Settings
from .samples import Comparison, Samples, html_table, last_message

if TYPE_CHECKING:
    from .trainer import Trainer
    from .training_pass import Devices


class Run:
    """A run that has ended: its figures and what changed."""

    def __init__(self, policy: Policy, report: Report, settings: Settings, devices: Devices) -> None:
        self.policy, self.report, self.settings = policy, report, settings
        self.devices = devices
        """the memory devices of its training passes"""

    @property
    def status(self) -> str:
        """done, interrupted or failed."""
        return self.report.status

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step, under TRL's names."""
        return self.report.steps

    def compare(self, before: Samples) -> Comparison:
        """The same prompts, sampled the same way, before and after."""
        after = self.policy.sample(before.rows, **before.sampling)
        return Comparison(before, after)

    @property
    def memory(self) -> MemoryReport:
        """Measured by the driver: the peak of each phase, and what the same run would have needed without Standby."""
        return MemoryReport(self.metrics[-1] if self.metrics else {}, self.report.savings, self.policy)

    def reward_trend(self) -> str:
        """Mean reward of the first and last fifth of the steps, in words."""
        first, last = fifths([step["reward"] for step in self.metrics])
        return f"mean reward of the first fifth of the steps {first:.3f}, of the last fifth {last:.3f}"


def fifths(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last fifth (at least one value)."""
    size = max(len(values) // 5, 1)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def resumed_report(settings: Settings, reward_names: Sequence[str], resumed: Any) -> Report:
    """The run's report; that of a resumed run goes on with the checkpoint's figures, whatever the file holds."""
    step = resumed.step if resumed else 0
    report = Report(
        dataclasses.asdict(settings),
        settings.output_dir,
        settings.max_steps,
        resume_from=step,
        reward_names=reward_names,
    )
    if resumed and report.steps != resumed.rows:
        for row in resumed.rows:
            report.add_step(row["step"], row)
    return report


def show_completions(dashboard: Any, rollout: Any, scores: Any, advantages: Any, num_generations: int) -> None:
    """A step's first prompt, with its completions, to the dashboard."""
    rows = []
    for j in range(num_generations):
        reward = advantages.rewards[j].item()
        rows.append(
            {
                "completion": rollout.completions[j].text,
                "reward": reward if reward == reward else None,
                "advantage": advantages.advantages[j].item(),
                "rewards": dict(zip(scores.names, scores.rows[j], strict=True)),
                "extra": {name: str(values[j])[:300] for name, values in scores.extra.items()},
            }
        )
    dashboard.completions(last_message(rollout.prompts[0]), rows)


class Callbacks:
    """transformers' callbacks and `report_to` integrations, driven at their usual moments."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Any]) -> None:
        from transformers import TrainerControl, TrainerState

        s = trainer.settings
        self.state, self.control = TrainerState(max_steps=s.max_steps), TrainerControl()
        self.state.global_step, self.state.log_history = trainer.steps_done, list(trainer.report.steps)
        self.handler = self.args = None
        if callbacks or s.report_to:
            from transformers import TrainingArguments, logging
            from transformers.integrations import get_reporting_integration_callbacks
            from transformers.trainer_callback import CallbackHandler

            verbosity = logging.get_verbosity()
            logging.set_verbosity_error()  # what these warn of is about a Trainer of transformers, which this is not
            self.args = TrainingArguments(
                output_dir=s.output_dir, max_steps=s.max_steps, learning_rate=s.learning_rate, seed=s.seed,
                per_device_train_batch_size=s.per_device_train_batch_size, report_to=list(s.report_to) or "none",
                gradient_accumulation_steps=s.gradient_accumulation_steps, use_cpu=trainer.device.type == "cpu",
            )  # fmt: skip
            reports = get_reporting_integration_callbacks(list(s.report_to)) if s.report_to else []
            self.handler = CallbackHandler(
                [*reports, *callbacks], trainer.model, trainer.policy.tokenizer, trainer.optimizer, trainer.scheduler
            )
            logging.set_verbosity(verbosity)

    def __enter__(self) -> Callbacks:
        if self.handler:
            self.control = self.handler.on_train_begin(self.args, self.state, self.control)
        return self

    def step_end(self, step: int, metrics: dict[str, float]) -> Any:
        """After a step. Returns the callbacks' `TrainerControl`: whether to save, or to stop."""
        self.state.global_step, self.control.should_save = step, False
        self.state.log_history.append(metrics | {"step": step})
        if self.handler:
            self.control = self.handler.on_step_end(self.args, self.state, self.control)
            self.control = self.handler.on_log(self.args, self.state, self.control, metrics)
        return self.control

    def saved(self, step: int) -> None:
        """A checkpoint is in `args.output_dir`. A run that ends before its time saves after `on_train_end`."""
        self.state.global_step = step
        if self.handler:
            self.control = self.handler.on_save(self.args, self.state, self.control)

    def __exit__(self, *_: Any) -> None:
        if self.handler:
            self.control = self.handler.on_train_end(self.args, self.state, self.control)


class MemoryReport:
    """A run's memory as a table that a notebook or a terminal shows."""

    def __init__(self, metrics: dict[str, Any], savings: dict[str, Any] | None, policy: Policy) -> None:
        self.metrics, self.savings, self.policy = metrics, savings, policy

    @property
    def lines(self) -> list[str]:
        m = self.metrics
        if "memory/peak_gib" not in m:
            return [
                f"No GPU: the driver's figures are missing. Shared weights {self.policy.weight_bytes / GIB:.2f} GiB, "
                f"KV cache {self.policy.standby.kv_cache_bytes / GIB:.2f} GiB (it stays in memory on a CPU)."
            ]
        lines = [
            f"generating {m['memory/awake_gib']:.2f} GiB, training {m['memory/asleep_gib']:.2f} GiB, by the driver; "
            f"KV cache {m['memory/kv_cache_gib']:.2f} GiB",
            f"the plan had estimated {m['memory/planned_awake_gib']:.2f} and {m['memory/planned_asleep_gib']:.2f} GiB",
        ]
        if s := self.savings:
            lines.append(
                f"with Standby {s['with_gib']:.2f} GiB at the peak; the same run without: {s['without_gib']:.2f} GiB; "
                f"saved {s['saved_gib']:.2f} GiB, {s['saved_gib'] / s['without_gib']:.0%} ({s['reference']})"
            )
        return lines

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        m, s = self.metrics, self.savings
        if not s or "memory/peak_gib" not in m:
            return "<br>".join(self.lines)
        awake, asleep, kv = (m[f"memory/{name}_gib"] for name in ("awake", "asleep", "kv_cache"))
        table = {
            "GiB, by the driver": ["with Standby", "the same run without"],
            "generating": [f"{awake:.2f}"] * 2,
            "training": [f"{asleep:.2f}", f"{asleep + kv:.2f}"],
            "at the peak": [f"{s['with_gib']:.2f}", f"{s['without_gib']:.2f}"],
        }
        saved = f"saved {s['saved_gib']:.2f} GiB, {s['saved_gib'] / s['without_gib']:.0%} (without: {s['reference']})"
        return html_table(table) + saved


class RunMemory:
    """The ledger's figures of one run: to the report, to the dashboard, and as the run's savings."""

    def __init__(self, policy: Policy, report: Report, pass_bytes: int) -> None:
        self.policy, self.report, self.began = policy, report, time.monotonic()
        self.pass_bytes = pass_bytes
        self.sampled = self.began
        if policy.ledger:
            policy.ledger.forget()

    def record(self, dashboard: Dashboard) -> dict[str, float]:
        """After a step: metrics in GiB by the driver, for this process. Empty on a CPU."""
        ledger, standby, policy = self.policy.ledger, self.policy.standby, self.policy
        if not ledger:
            return {}
        peaks, kv = ledger.peaks, standby.kv_cache_bytes
        ledger.sample()
        parts = {"weights": policy.weight_bytes, "kv_cache": kv}
        parts["training"] = max(peaks.get("training", 0) - policy.idle_bytes, 0)
        parts["other"] = max(policy.idle_bytes - parts["weights"] - (0 if standby.enabled else kv), 0)
        total = ledger.driver.total
        dashboard.memory(
            {name: size / GIB for name, size in parts.items()},
            free_gib=(total - ledger.driver.used()) / GIB, total_gib=total / GIB,
        )  # fmt: skip
        new = [sample for sample in ledger.samples if sample[0] > self.sampled]
        for moment, used, phase in new[:: max(len(new) // 30, 1)]:
            self.report.memory_sample(moment - self.began, used / GIB, phase)
        self.sampled = time.monotonic()
        self.report.savings = savings(peaks, kv, standby.enabled) or self.report.savings
        planned = dataclasses.replace(policy.plan.sizes, activations=self.pass_bytes)
        awake, asleep = planned.peaks(kv, standby.enabled, trained_before=bool(self.report.steps))
        return {
            "memory/planned_awake_gib": awake / GIB, "memory/planned_asleep_gib": asleep / GIB,
            "memory/peak_gib": max(peaks.values()) / GIB, "memory/asleep_gib": peaks.get("training", 0) / GIB,
            "memory/awake_gib": peaks.get("generating", 0) / GIB,
            "memory/kv_cache_gib": kv / GIB, "memory/freed_gib": standby.freed_bytes / GIB,
        }  # fmt: skip
