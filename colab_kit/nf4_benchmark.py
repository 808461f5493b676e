"""The 4-bit product beside bitsandbytes', on the card at hand.

    python -m colab_kit.nf4_benchmark kernel      every shape and batch: error, microseconds of each variant and split
    python -m colab_kit.nf4_benchmark engine --model llama31_8b --batches 8,16,32,64

`kernel` times with the GPU's cache overwritten before each call, so that the weight comes from memory. `engine` decodes
with and without the kernel, base and adapter, each in a fresh process, and says where an adapter's step goes. Random
inputs; medians.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

from . import nf4
from .benchmark import random_model
from .products import seconds, timings

SHAPES = {
    "Llama-3.1-8B qkv": ([4096, 1024, 1024], 4096),
    "Llama-3.1-8B o": ([4096], 4096),
    "Llama-3.1-8B gate, up": ([14336, 14336], 4096),
    "Llama-3.1-8B down": ([4096], 14336),
    "Qwen3-32B qkv": ([8192, 1024, 1024], 5120),
    "Qwen3-32B o": ([5120], 8192),
    "Qwen3-32B gate, up": ([25600, 25600], 5120),
    "Qwen3-32B down": ([5120], 25600),
}
PARTS = {
    "LoRA": "lora",
    "4-bit products": "nf4_matmul|prepare_x|4bit|dequantize",
    "attention": "attention|flash|fmha|reshape_and_cache|rotary|reduce_segments",
    "16-bit products (the head; bitsandbytes' unpacked weights)": "nvjet|gemm|gemv|cutlass|splitk",
    "norms, activation": "norm|silu|act_and_mul",
    "sampling and the rest": "",
}
"""of a decoding step, by what the names of their kernels hold"""


def kernel(batches: list[int], dtypes: list[str]) -> None:
    import torch
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    print("| weight | dtype | batch | bitsandbytes | this | ratio | error, bitsandbytes | error, this | variants |")
    print("|" + "---|" * 9, flush=True)
    for name, (shards, k) in SHAPES.items():
        parts = [quantize_4bit(torch.randn(n, k, device="cuda"), blocksize=64, quant_type="nf4") for n in shards]
        packed, states = torch.cat([part for part, _ in parts]), [state for _, state in parts]
        mine, ends = nf4.weight(packed, states), [0]
        for n in shards:
            ends.append(ends[-1] + n * k // 2)
        rows = [packed[i:j] for i, j in zip(ends, ends[1:], strict=False)]
        for dtype in (getattr(torch, name) for name in dtypes):

            def theirs(x, rows=rows, states=states):
                return torch.cat([matmul_4bit(x, r.t(), s) for r, s in zip(rows, states, strict=True)], dim=-1)

            for batch in batches:
                x = torch.randn(batch, k, device="cuda").to(dtype)
                line = f"| {name} {mine.n} x {k} | {str(dtype)[6:]} | {batch} | "
                try:
                    times = timings(x, mine)
                    best = min(times, key=times.get)
                    usual = seconds(functools.partial(theirs, x))
                    errors = [[], []]
                    ours, others, at = nf4.matmul(x, mine, *best).double(), theirs(x).double(), 0
                    for r, state in zip(rows, states, strict=True):
                        state.dtype, kept = torch.float32, state.dtype
                        truth = x.double() @ dequantize_4bit(r, state).double().T
                        state.dtype, end = kept, at + truth.shape[1]
                        for found, result in zip(errors, (others, ours), strict=True):
                            found.append(((result[:, at:end] - truth).norm() / truth.norm()).item())
                        at = end
                    each = ", ".join(
                        f"{v.MT} {v.R} {v.WARPS} {v.RESIDENT} {v.WGMMA} split {s}: {t * 1e6:.0f}"
                        for (v, s), t in times.items()
                    )
                    line += f"{usual * 1e6:.0f} | {times[best] * 1e6:.0f} | {usual / times[best]:.1f} | "
                    print(line + f"{max(errors[0]):.2e} | {max(errors[1]):.2e} | {each} |", flush=True)
                except RuntimeError as error:
                    print(line + str(error).replace("\n", " ")[:300], flush=True)


def engine(model: str, batches: list[int], use: bool, tokens: int = 128) -> None:
    import colab_kit as kit

    settings = kit.Settings(
        model_name_or_path=model, dtype="bfloat16", lora_r=32, lora_alpha=64, num_generations=2, nf4_kernel=use,
        max_prompt_length=512, max_completion_length=256, vllm_max_num_seqs=max(batches),
        vllm_gpu_memory_utilization=0.5, output_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    policy = kit.load(settings)
    ids = [[5, 6, 7, 8 + i, 9, 10, 11, 12] * 16 for i in range(max(batches))]
    with policy.standby.awake():
        for batch in batches:
            for adapter in (None, policy.slot.request):
                options = {"temperature": 1, "ignore_eos": True, "lora_request": adapter}
                generate = functools.partial(policy.engine.generate, ids[:batch], **options)
                took = []
                for count in (8, 8, tokens, tokens):
                    start = time.perf_counter()
                    generate(max_tokens=count)
                    took.append(time.perf_counter() - start)
                step = (min(took[2:]) - min(took[:2])) / (tokens - 8)
                row = f"| {'kernel' if use else 'bitsandbytes'} | {batch} | {'adapter' if adapter else 'base'} |"
                rates = f"{batch * tokens / min(took[2:]):.0f} tokens/s | {batch / step:.0f} without the prompt |"
                print(row, rates, flush=True)
            parts = step_parts(generate)
            parts["no kernel runs"] = 1e6 * step - sum(parts.values())
            for part, microseconds in parts.items():
                print(row, f"{part} | {microseconds:.0f} of {1e6 * step:.0f} us a step |", flush=True)


def step_parts(generate: Callable, counts: tuple[int, int] = (8, 40)) -> dict[str, float]:
    """Microseconds of PARTS in a decoding step: what generating more tokens takes longer."""
    from torch.profiler import ProfilerActivity, profile

    found: Counter = Counter()
    for count, sign in zip(counts, (-1, 1), strict=True):
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            generate(max_tokens=count)
        for event in trace.key_averages():
            part = next(part for part, pattern in PARTS.items() if re.search(pattern, event.key, re.IGNORECASE))
            found[part] += sign * event.self_device_time_total / (counts[1] - counts[0])
    return {part: found[part] for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernel", "engine"))
    parser.add_argument("--model", help="one of colab_kit.shapes, or a folder")
    parser.add_argument("--batches", default="1,8,16,32,64")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--use", choices=("0", "1"), help="engine: only with (1) or without (0) the kernel")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    if options.what == "kernel":
        kernel(batches, options.dtypes.split(","))
    elif options.use:
        engine(random_model(options.model), batches, options.use == "1")
    else:
        for use in "01":
            command = [sys.executable, "-m", "colab_kit.nf4_benchmark", *sys.argv[1:], "--use", use]
            subprocess.run(command, env=os.environ | {"UNSLOTH_VLLM_STANDBY": "1", "COLAB_KIT_DASHBOARD": "off"})


if __name__ == "__main__":
    main()
