"""Figures that stand in for a run: plausible, seeded, measured on nothing. For tests and for development only.

`play(dash, report)` feeds them to a dashboard as the trainer would. Nothing made from them belongs in the README.
"""

from __future__ import annotations

import random
import time

SETTINGS = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "beta": 0.02}
SAVINGS = {
    "with_gib": 10.62,
    "without_gib": 12.57,
    "saved_gib": 1.95,
    "reference": "stand-in figures, not a measurement",
}
PROMPT = "What is 7 + 6? Write the answer between <answer> and </answer>."


def step_metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    """One step, under TRL's names."""
    learned = 1 / (1 + 2.718 ** (-8 * (step / steps - 0.45)))
    tags = min(1.0, max(0.0, 0.05 + 0.7 * learned + rng.gauss(0, 0.06)))
    right = min(1.0, max(0.0, 0.02 + 0.42 * learned + rng.gauss(0, 0.05)))
    spent = {"generating": rng.gauss(4.5, 0.3), "scoring": 0.02, "training": rng.gauss(4.4, 0.2), "syncing": 0.05}
    return {
        "reward": tags + right,
        "reward_std": 0.18 + 0.15 * learned + abs(rng.gauss(0, 0.05)),
        "frac_reward_zero_std": rng.choice([0, 0, 0, 0, 0.5]) if step > 4 else 0.5,
        "rewards/right_format/mean": tags,
        "rewards/right_format/std": 0.3,
        "rewards/correct_answer/mean": right,
        "rewards/correct_answer/std": 0.4,
        "completions/mean_length": 44 - 20 * learned + rng.gauss(0, 1.5),
        "completions/clipped_ratio": max(0.0, 0.6 - 0.6 * learned + rng.gauss(0, 0.04)),
        "kl": 0.0005 + 0.02 * learned + abs(rng.gauss(0, 0.001)),
        "loss": rng.gauss(0, 0.02),
        "grad_norm": 0.4 + abs(rng.gauss(0, 0.1)),
        "learning_rate": 2e-4,
        "entropy": 1.2 - 0.6 * learned,
        "num_tokens": 1400 * step,
        "step_time": sum(spent.values()),
        "memory/peak_gib": 10.1 + 0.5 * rng.random(),
        "memory/freed_gib": 7.2,
        **{f"time/{phase}": seconds for phase, seconds in spent.items()},
    }


def generations(rng: random.Random, step: int) -> list[dict]:
    rewards = [(float(rng.random() < 0.6), float(rng.random() < 0.4)) for _ in range(8)]
    totals = [a + b for a, b in rewards]
    mean = sum(totals) / 8
    std = (sum((t - mean) ** 2 for t in totals) / 8) ** 0.5 or 1
    rows = []
    for index, (tags, right) in enumerate(rewards):
        said = f"<answer>{13 if right else 12 + index % 5}</answer>" if tags else "The sum of 7 and 6 is 13."
        if index % 3 == 2:
            said = f"Step {step}. First I add 7 and 3 to get 10.\nThen 3 is left, since 6 = 3 + 3.\n" * 3 + said
        rows.append(
            {
                "completion": said,
                "reward": tags + right,
                "advantage": (tags + right - mean) / std,
                "rewards": {"right_format": tags, "correct_answer": right},
            }
        )
    return rows


def play(dash, report, *, steps: int | None = None, memory: bool = True, pause: float = 0.0, until: int | None = None):
    """Feeds `until` of `steps` steps to the dashboard; `pause` seconds between its calls."""
    rng, steps, at = random.Random(6), steps or report.total_steps, 0.0
    for step in range(1, (until or steps) + 1):
        for phase, units in (("generating", 16), ("scoring", 0), ("training", 4), ("syncing", 0)):
            dash.phase(phase)
            asleep = phase != "generating"
            used = {"weights": 5.4, "kv_cache": 0.0 if asleep else 4.4, "other": 0.4}
            used["training"] = 4.6 if phase == "training" else 0.3
            total = sum(used.values())
            for done in range(units + 1):
                if memory:
                    report.memory_sample(at, total + 0.1 * rng.random(), "asleep" if asleep else "awake")
                    dash.memory(used_gib=used, free_gib=14.56 - total, total_gib=14.56)
                at += 4.5 / (units + 1)
                if units:
                    dash.progress(done, units, "completions" if phase == "generating" else "micro-batches")
                if pause:
                    time.sleep(pause)
        if step == (until or steps) and step < steps:
            return  # stopped before the figures of this step
        dash.completions(PROMPT, generations(rng, step))
        dash.step(step, step_metrics(step, steps, rng))
