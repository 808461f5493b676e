"""What the benchmark runs in each fresh process: load, train whole steps, print one JSON line a result."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import resource
import time
from pathlib import Path
from statistics import median

from .presets import Settings

FIGURES = {
    "step_s": "step_time", "generating_s": "time/generating", "training_s": "time/training",
    "logp_difference": "sampling/sampling_logp_difference/mean",
}  # fmt: skip
"""of a row, medians of its steps; the last: sampler against trainer"""
MEMORY = ("peak", "awake", "asleep", "kv_cache", "planned_awake", "planned_asleep")


def settings_for(options: argparse.Namespace, utilization: float | None, longest: int) -> Settings:
    """Settings for sequences of `longest` tokens."""
    return Settings(
        model_name_or_path=options.model, load_in_4bit=not options.sixteen, dtype=options.dtype, lora_r=options.rank,
        lora_alpha=2 * options.rank, num_generations=options.generations,
        per_device_train_batch_size=options.generations, gradient_accumulation_steps=options.accumulation,
        max_completion_length=options.completion, max_prompt_length=longest - options.completion,
        vllm_max_num_seqs=options.generations, sdpa_backend=options.sdpa, vllm_attention_backend=options.attention,
        vllm_gpu_memory_utilization=utilization, max_steps=max(options.steps, 1), log_completions=False,
        output_dir=str(Path(options.work) / "out"), learning_rate=1e-5,
        activation_offloading=True if options.offload else None, gradient_checkpointing=None if options.keep else True,
        nf4_kernel=not options.bitsandbytes,
    )  # fmt: skip


def at_length(settings: Settings, length: int) -> Settings:
    """The same for sequences of `length`: as many a micro-batch as make 8,192 tokens, at least one; where layers may be
    kept whole, as the card allows."""
    together = max(length, min(8192, settings.completions_per_step * length))
    if settings.gradient_checkpointing is None:
        together = None
    return settings.replace(
        max_tokens_per_micro_batch=together, max_prompt_length=length - settings.max_completion_length
    )


def prepare(options: argparse.Namespace, utilization: float | None, longest: int):
    from . import enable_standby, load

    enable_standby()
    settings = settings_for(options, utilization, longest)
    if options.dummy:
        from .engine import Engine

        Engine.start = functools.partial(Engine.start, load_format="dummy")
    return load(settings), settings


def alternating(completions, **_):
    return [float(i % 2) for i in range(len(completions))]


def train_at(policy, settings: Settings, length: int, steps: int, callbacks=()):
    """`steps` whole steps on sequences of `length` tokens."""
    from . import train

    words = [f"w{10 + (i * 7) % 400}" for i in range(length)]
    prompt_tokens = length - settings.max_completion_length - 1  # and one token of BOS
    rows = [{"prompt": " ".join((words[i:] + words[:i])[:prompt_tokens])} for i in range(8)]
    changed = at_length(settings, length).replace(max_steps=steps)
    return train(policy, rows, [alternating], changed, callbacks=callbacks)


def measure(options: argparse.Namespace) -> None:
    """One configuration: ascending lengths until memory runs out. One JSON line for each length."""
    lengths = [int(length) for length in options.lengths.split(",")]
    utilization = options.utilization
    if utilization and options.card:
        utilization *= options.card * 2**30 / card_total()  # vLLM's share is of the whole card
    start, policy, refused = time.perf_counter(), None, []
    while policy is None and lengths:
        try:
            policy, settings = prepare(options, utilization, lengths[-1])
        except MemoryError as error:  # the plan's, before anything is loaded: the next shorter length is tried
            refused.append({"length": lengths.pop(), "status": "does not fit", "comment": last_line(error)})
        except (RuntimeError, ValueError) as error:
            report({"length": lengths[-1], "status": "does not load", "comment": last_line(error)})
            return
    loaded = time.perf_counter() - start
    if options.kernels:
        report({"kernels": kernels(policy)})
    chosen = {"products": policy.engine.products.summary()} if policy else {}
    for length in lengths:
        steps = options.steps if length <= 4096 else 1
        start = time.perf_counter()
        row = {"length": length, "kv_tokens": policy.engine.kv_cache_tokens, "load_s": loaded} | chosen
        try:
            run = train_at(policy, settings, length, steps)
        except MemoryError as error:
            train_at(policy, settings, lengths[0], 1)  # raises if the process could not go on
            after = f"; afterwards {lengths[0]:,} tokens trained in the same process"
            report(row | {"status": "out of memory", "comment": last_line(error) + after})
            break
        last = run.metrics[-1]
        row |= {"status": f"{steps} steps, {(time.perf_counter() - start) / 60:.1f} min"}
        row |= {name: last.get(f"memory/{name}_gib") for name in MEMORY}
        row |= {"sequences": settings.completions_per_step, "savings": run.report.savings}
        row["devices"] = dataclasses.asdict(run.devices)
        row["system_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # with what is pinned
        row |= {key: median(step[name] for step in run.metrics) for key, name in FIGURES.items()}
        if policy.ledger:
            row["samples"] = [
                (round(t - policy.ledger.samples[0][0], 2), round(used / 2**30, 3), phase)
                for t, used, phase in list(policy.ledger.samples)[::10]
            ]
        report(row)
    for row in reversed(refused):
        report(row)


def passes(options: argparse.Namespace) -> None:
    """The training pass alone, one sequence, by each set of memory devices in turn: seconds, peak, gradients."""
    import torch

    from .long_context import choose_pass, prepare_model
    from .training_pass import Devices, activations

    lengths = [int(length) for length in options.lengths.split(",")]
    policy, settings = prepare(options, options.utilization, lengths[-1])
    _, chosen, _, _ = choose_pass(policy, settings.replace(activation_offloading=True, mlp_tile_tokens=4096))
    model, expand = policy.model.get_base_model(), chosen.expand_kv
    prepare_model(model)
    torch.manual_seed(0)
    for p in policy.model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.02)  # with B = 0, A would have no gradient
    ways = {
        "plain checkpoints": Devices(True, expand_kv=expand),
        "MLP in tiles of 4,096": Devices(True, False, 4096, expand),
        "offloaded, tiles of 4,096": chosen,
        "nothing recomputed": Devices(expand_kv=expand),
    }
    for length in lengths:
        rows = {name: {"length": length, "way": name, "s": []} for name in ways if re.search(options.ways, name)}
        for name, row in rows.items():
            estimate = activations(model.config, settings, policy.engine.dtype.itemsize, length, ways[name], 10**13)
            row["estimated_gib"] = estimate / 2**30
        gradients = {}
        for _ in range(options.steps + 1):  # the first warms up; offloading pins its memory then
            for name, row in rows.items():
                if "failed" not in row:
                    one_pass(policy, length, ways[name], row, gradients)
        for name, row in rows.items():
            if "failed" not in row:
                row["first_s"], row["median_s"] = row["s"][0], median(row["s"][1:])
                row["flop_utilization"] = flops(model.config, length) / row["median_s"] / options.peak_tflops / 1e12
            if name in gradients and (first := gradients.get("plain checkpoints")) is not None:
                row["gradient_difference"] = ((gradients[name] - first).norm() / first.norm()).item()
            report(row)


def one_pass(policy, length: int, devices, row: dict, gradients: dict) -> None:
    """Forward and backward over one sequence: seconds and peak go to `row`, the adapter's gradient to `gradients`."""
    import torch

    from .long_context import hidden_states

    sequence = [10 + (i * 7) % 400 for i in range(length)]
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    store = policy.host_store if devices.activation_offloading else None
    policy.engine.give_back_cached_blocks()
    policy.ledger.forget()
    policy.ledger.enter("pass")
    idle, start = policy.ledger.sample(), time.perf_counter()
    try:
        with torch.autocast("cuda", policy.engine.dtype, policy.engine.dtype != torch.float32):
            states = hidden_states(policy.model.get_base_model().model, [sequence], devices, store)
            states[-64:].float().pow(2).mean().mul(1e3).backward()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    else:
        row["s"].append(time.perf_counter() - start)
        policy.ledger.enter("idle")
        row["peak_gib"] = (policy.ledger.peaks["pass"] - idle) / 2**30
        gradients[row["way"]] = torch.cat([p.grad.flatten() for p in trained]).double()
    for p in trained:
        p.grad = None


def flops(config, tokens: int) -> float:
    """Of one training pass that trains LoRA only, recomputation not counted: forward and the inputs' gradient take 2
    each a weight and token; causal attention takes 2 T^2 a query width and layer forward, twice that backward."""
    from .training_pass import dimensions

    d = dimensions(config)
    weights = d.layers * (2 * d.h * d.q + 2 * d.h * d.kv + 3 * d.h * d.inter)
    return 4.0 * weights * tokens + 3 * 2.0 * d.layers * d.q * tokens**2


def soak(options: argparse.Namespace) -> None:
    length = int(options.lengths.split(",")[0])
    policy, settings = prepare(options, options.utilization, length)
    train_at(policy, settings, length, 2)  # warm up kernels and buffers
    report(cycles(policy, settings, min(length, 256), options.cycles))
    if options.steps:
        report(pairs(policy, settings, length, options.steps))


def pairs(policy, settings: Settings, length: int, count: int) -> dict:
    """Steps of one run with and without Standby in turn: medians and their ratio."""
    turns = [bool(i % 2) == (i // 2 % 2 == 0) for i in range(2 * count)]  # off on on off off on ...

    def switch(step: int) -> None:
        print(f"{step} of {len(turns)} steps", flush=True)
        policy.standby.wake()
        policy.standby.enabled = turns[step % len(turns)] and policy.engine.can_release
        policy.standby.sleep()

    switch(0)
    run = train_at(policy, settings, length, len(turns), [AfterStep(switch)])
    seconds = {
        on: [row["step_time"] for row, turn in zip(run.metrics, turns, strict=True) if turn == on] for on in (1, 0)
    }
    policy.standby.wake()
    policy.standby.enabled = policy.engine.can_release
    policy.standby.sleep()
    with_standby, without = median(seconds[1]), median(seconds[0])
    each = {"each_with_s": seconds[1], "each_without_s": seconds[0]}
    return {"length": length, "with_s": with_standby, "without_s": without, "ratio": with_standby / without} | each


def cycles(policy, settings: Settings, length: int, count: int) -> dict:
    """Whole steps, each with a wake, a generation and a sleep; greedy output before and after a cycle; drift."""

    def greedy(awake: bool):
        prompts = [[5 + (i * j) % 300 for i in range(32)] for j in range(4)]
        with policy.standby.awake():
            if not awake:
                policy.standby.sleep()
                policy.standby.wake()
            groups = policy.engine.generate(prompts, temperature=0, max_tokens=min(64, length - 32))
        return [group[0].token_ids for group in groups]

    def note(step: int) -> None:
        sleeps.append(policy.standby.sleep_seconds)
        wakes.append(policy.standby.wake_seconds)
        policy.engine.give_back_cached_blocks()
        resident.append(policy.ledger.sample() / 2**20 if policy.ledger else 0.0)

    same = greedy(awake=True) == greedy(awake=False)
    sleeps, wakes, resident = [], [], []
    train_at(policy, settings.replace(max_completion_length=8), length, count, [AfterStep(note)])
    quarter = count // 4
    return {
        "cycles": count, "sleep_ms": 1e3 * median(sleeps), "wake_ms": 1e3 * median(wakes),
        "greedy_same_after_a_cycle": same, "drift_mib": resident[-1] - resident[quarter],
        "spread_mib": max(resident[quarter:]) - min(resident[quarter:]),
        "kv_cache_gib": policy.standby.kv_cache_bytes / 2**30, "idle_gib": policy.idle_bytes / 2**30,
    }  # fmt: skip


def AfterStep(call):
    """A transformers callback that calls `call(steps done)` after each step."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            call(state.global_step)

    return Callback()


def kernels(policy) -> dict[str, int]:
    """The 4-bit kernels that run while decoding, by name, with their calls."""
    from torch.profiler import ProfilerActivity, profile

    with policy.standby.awake(), profile(activities=[ProfilerActivity.CUDA]) as trace:
        policy.engine.generate([[5, 6, 7, 8]] * 2, max_tokens=8, ignore_eos=True)
    names = {event.key: event.count for event in trace.key_averages()}
    return {name[:160]: count for name, count in names.items() if "4bit" in name.lower() or "gemm" in name.lower()}


def report(row: dict) -> None:
    print("RESULT " + json.dumps(row), flush=True)


def last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]


def card_total() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory
