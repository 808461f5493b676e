"""Will a T4 run every GPU kernel of a training step? Asked without a T4.

    python -m colab_kit.t4_audit triton                       # anywhere: vLLM's Triton kernels, compiled for sm_75
    python -m colab_kit.t4_audit wheels FOLDER [--record R]   # anywhere: is there sm_75 code in the pinned wheels
    python -m colab_kit.t4_audit record R                     # on any newer GPU: every kernel of whole steps

`triton` calls vLLM's own launchers with the preset's shapes, on a driver that is not there and says it is a T4, and
compiles what they ask for down to machine code. `wheels` looks into unpacked wheels with NVIDIA's cuobjdump (`pip
install nvidia-cuda-cuobjdump`). `record` runs steps of the preset over two layers of Llama-3.1-8B's shapes on a card
that poses as a T4 to all who choose a kernel by that; its list is then what `wheels` looks for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
import types
from pathlib import Path
from typing import Any

from . import presets
from .shapes import SHAPES, write_checkpoint

CAPABILITY, MULTIPROCESSORS = (7, 5), 40
SHARED_BYTES = 64 * 1024
"""shared memory that one block of a T4 may have"""
FOREIGN = re.compile(r"\.(?:bf16|e[45]m[23])\w*|\bcp\.async|\bmbarrier|\bwgmma|\.target sm_(?!75)")
"""what sm_75 does not have, as PTX writes it"""
EXPECTED = (
    "vllm::rms_norm_kernel<c10::Half", "vllm::fused_add_rms_norm_kernel<c10::Half",
    "vllm::rotary_embedding_kernel<c10::Half", "vllm::act_and_mul_kernel<c10::Half",
    "gemm_4bit_simt<__half, 4>", "gemm_4bit_sm75_m16n8k8<__half", "kDequantizeBlockwise<__half",
    "kOptimizerStatic8bit2StateBlockwise<float", "fmha_cutlassF_f16_aligned_32x128_rf_sm75",
    "fmha_cutlassB_f16_aligned_64x64_k128_sm75", "vectorized_elementwise_kernel", "native::reduce_kernel",
    "cunn_SoftMaxForward", "native::vectorized_gather_kernel", "CatArrayBatchedCopy", "multi_tensor_apply",
    "distribution_elementwise",
)  # fmt: skip
"""what a step is known to launch, from the sources; `record` replaces it by what was seen"""
CUBLAS = re.compile(r"nvjet|cublas|xmma|cutlass::Kernel|gemvx|gemmk1|splitK")
"""cuBLAS chooses among its kernels by the card: there the library must hold sm_75 code"""


# --- Triton --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compilations(card: Any = None):
    """A list that fills with (source, options) of each Triton compilation.

    They are compiled for `card`, whatever target is asked for; with None they are only noted, and launched nowhere.
    """
    import triton
    import triton.compiler.compiler as compiler

    found, real, owners = [], compiler.compile, (triton, triton.compiler, compiler)
    nothing = dict.fromkeys(("launch_metadata", "run"), lambda *args: None)
    not_launched = types.SimpleNamespace(**nothing, function=None, packed_metadata=None)

    def compile(src, target=None, options=None, **more):
        found.append((src, dict(options or {})))
        return real(src, target=card, options=options, **more) if card else not_launched

    for owner in owners:
        owner.compile = compile
    try:
        yield found
    finally:
        for owner in owners:
            owner.compile = real


def for_t4(found: list[tuple[Any, dict]]) -> list[dict[str, Any]]:
    """Each compilation again, for sm_75, down to machine code; one row for each different outcome.

    `constants`: the tile sizes; `shared`: bytes of shared memory; `matrix_units`: whether its `tl.dot` runs on them,
    None without one; `problem`: "" if a T4 can run it.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    rows = []
    for src, options in found:
        keep = {name: options[name] for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg") if name in options}
        tiles = {src.fn.arg_names[key[0]]: value for key, value in src.constants.items() if type(value) in (int, bool)}
        tiles = {name: int(value) for name, value in tiles.items() if re.match("BLOCK_.$|TILE|SPLIT|IS_3D", name)}
        row = {"name": src.fn.fn.__name__, "constants": tiles, "options": keep, "shared": None, "matrix_units": None}
        try:
            kernel = triton.compile(src, target=GPUTarget("cuda", 75, 32), options=keep)
            row["shared"] = kernel.metadata.shared
            if "tt.dot" in kernel.asm["ttir"]:
                row["matrix_units"] = "mma.sync" in kernel.asm["ptx"]
            foreign = sorted(set(FOREIGN.findall(kernel.asm["ptx"])))
            row["problem"] = f"sm_75 lacks {', '.join(foreign)}" if foreign else ""
            if kernel.metadata.shared > SHARED_BYTES:
                row["problem"] = f"{kernel.metadata.shared} bytes of shared memory, a T4 has {SHARED_BYTES}"
        except Exception as error:  # whatever the compiler raises is the finding
            row["problem"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if row not in rows:
            rows.append(row)
    return rows


def preset_kernels() -> list[dict[str, Any]]:
    """vLLM's Triton kernels at the T4 preset's shapes: attention and its cache. Needs a process of its own."""
    import torch
    import triton
    import vllm.platforms
    from triton.backends.compiler import GPUTarget

    # vLLM switches its Triton kernels off on a CPU, by its package's name and by who says to be active.
    assert vllm.platforms.current_platform is not None  # chosen by that name too, and must stay the CPU's
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "of a GPU" if name == "vllm" else version(name)
    for name, backend in triton.backends.backends.items():
        backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    card = GPUTarget("cuda", 75, 32)
    driver = dict(get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: card)
    triton.runtime.driver.set_active(types.SimpleNamespace(**driver))
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    shape, s = SHAPES["llama31_8b"], presets.LLAMA31_8B_T4
    heads, kv, d = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32)

    def half(*size: int) -> Any:
        return torch.empty(size, dtype=torch.float16)

    caches, segments, threshold = (half(64, 16, kv, d), half(64, 16, kv, d)), 16, 128 // kv
    softmax = (torch.empty(threshold, heads, segments, d), *(torch.empty(threshold, heads, segments) for _ in range(2)))
    with compilations() as found:
        for sequences, tokens in ((1, 1), (s.num_generations, 1), (threshold + 8, 1), (1, s.max_prompt_length)):
            q, scale = half(sequences * tokens, heads, d), torch.ones(1).expand(sequences, kv)
            starts = ints(*range(0, sequences * tokens + 1, tokens))
            unified_attention(
                q, *caches, torch.empty_like(q), starts, tokens, ints(*[600] * sequences), 600, d**-0.5, True, (-1, -1),
                ints(*[0] * 96 * sequences).view(sequences, 96), 0.0, None, scale, scale, threshold, segments, *softmax,
            )  # fmt: skip
            key, one = half(sequences * tokens, kv, d), torch.ones(1)
            triton_reshape_and_cache_flash(
                key, key, *caches, torch.zeros(len(key), dtype=torch.int64), "auto", one, one
            )
    return for_t4(found)


# --- wheels --------------------------------------------------------------------------------------------------


def code_in_wheels(kernels: list[str], folder: Path, cuobjdump: str) -> tuple[dict[str, str], dict[str, str]]:
    """({kernel: library with machine code for sm_75, or ""}, {library: its architectures}).

    A kernel counts by the start of its name as given, or without its template's arguments. One made for another card
    (`..._sm80`) must have a sibling for sm75: under its own name the sm_75 code is an empty shell.
    """
    symbols: dict[str, str] = {}
    architectures = {}
    for file in sorted(folder.rglob("*.so*")):
        if b".nv_fatbin" not in file.read_bytes() or re.search("bitsandbytes_cuda1[12]", file.name):  # CUDA 11 and 12
            continue
        listed = set(re.findall(r"sm_(\d+)(\w?)", run(cuobjdump, "--list-elf", str(file))))
        architectures[file.name] = " ".join(number + a for number, a in sorted(listed, key=lambda x: (int(x[0]), x[1])))
        if ("75", "") in listed:
            for line in run("c++filt", stdin=run(cuobjdump, "-symbols", "-arch", "sm_75", str(file))).splitlines():
                if "ENTRY" in line:
                    symbols.setdefault(line.split("ENTRY", 1)[1].strip().removeprefix("void "), file.name)
    found = {}
    for name in kernels:
        if CUBLAS.search(name):
            found[name] = next((lib for lib, archs in architectures.items() if "cublasLt" in lib and "75" in archs), "")
            continue
        wanted = name.removeprefix("void ")
        if re.search(r"sm(8|9|1\d)\d", wanted):
            head = re.split(r"_\d+x\d+|sm\d+", wanted)[0]
            found[name] = next((lib for x, lib in symbols.items() if x.startswith(head) and "sm75" in x), "")
            continue
        stem = wanted.partition("<")[0] + "<"  # another version of torch may write the arguments otherwise
        match = next((x for x in symbols if wanted in x), None) or next((x for x in symbols if stem in x), None)
        found[name] = symbols.get(match, "")
    return found, architectures


def run(*command: str, stdin: str | None = None) -> str:
    return subprocess.run(command, input=stdin, capture_output=True, text=True).stdout


# --- record: on a GPU ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def posing_as_t4():
    """Whoever chooses a kernel by the card's capability meets a T4's. What compiles and launches is the real card's."""
    import bitsandbytes.backends.cuda.ops as bnb
    import torch
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    platform = type(current_platform)
    changes = [
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (platform, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(*CAPABILITY))),
        (platform, "get_device_name", classmethod(lambda cls, device_id=0: "Tesla T4")),
        (platform, "num_compute_units", classmethod(lambda cls, device_id=0: MULTIPROCESSORS)),
        (bnb, "_gpu_dispatch_props", lambda device: (MULTIPROCESSORS, *CAPABILITY)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            inherited = name not in owner.__dict__
            stack.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, owner.__dict__[name])))
            setattr(owner, name, value)
        yield


def record(file: Path, model: str = "llama31_8b", layers: int = 2) -> list[dict[str, Any]]:
    """A step of the preset, then one under torch's profiler; `file` gets {"kernels": {name: [launches, microseconds]}}.

    Returns the rows of `for_t4` for every Triton kernel that was compiled.
    """
    import torch
    import triton
    from torch.profiler import ProfilerActivity, profile

    from . import enable_standby, load, train
    from .measure import alternating

    enable_standby()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, where they are seen
    settings = presets.LLAMA31_8B_T4.replace(
        max_steps=1, log_completions=False, save_minutes=None, sdpa_backend="efficient", output_dir=tempfile.mkdtemp(),
        model_name_or_path=str(write_checkpoint(model, tempfile.mkdtemp(), num_hidden_layers=layers)),
    )  # fmt: skip
    card = triton.runtime.driver.active.get_current_target()
    rows = [{"prompt": " ".join(f"w{10 + (i + j) * 7 % 400}" for j in range(300))} for i in range(4)]
    short = settings.replace(max_completion_length=64)
    with posing_as_t4(), compilations(card) as found:
        policy = load(settings)
        train(policy, rows, [alternating], short)
        policy.sample(rows[:1], n=2, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=8)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            train(policy, rows, [alternating], short)
    kernels: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count = kernels.setdefault(event.name, [0, 0.0])
            count[:] = count[0] + 1, round(count[1] + event.time_range.elapsed_us(), 1)
    triton_names = {src.fn.fn.__name__ for src, _ in found}
    kernels = {
        name: kernels[name] for name in sorted(kernels) if name not in triton_names and name[:3].lower() != "mem"
    }
    file.write_text(json.dumps({"kernels": kernels}, indent=1))
    return for_t4(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("triton", "wheels", "record"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--record", type=Path, help="wheels: what `record` wrote; without it, what sources say")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    options = parser.parse_args(arguments)
    if options.what == "wheels":
        names = list(json.loads(options.record.read_text())["kernels"]) if options.record else list(EXPECTED)
        found, architectures = code_in_wheels(names, options.path, options.cuobjdump)
        print("\n".join(f"{library}: {archs}" for library, archs in architectures.items()))
        print("\n".join(f"{library or 'NOT FOUND'}  {name[:150]}" for name, library in found.items()))
        return int(not all(found.values()))
    rows = record(options.path) if options.what == "record" else preset_kernels()
    for row in rows:
        units = {True: "matrix units", False: "no matrix units", None: ""}[row["matrix_units"]]
        print(f"{row['problem'] or 'ok'}  {row['name']}  {row['constants']}  {row['shared']} bytes shared  {units}")
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
