"""Will a T4 run every GPU kernel of a training step? Asked without a T4.

    python -m colab_kit.t4_audit record FILE                   # on any newer GPU: steps of the T4 preset
    python -m colab_kit.t4_audit triton FILE                   # anywhere: compile its Triton kernels for sm_75
    python -m colab_kit.t4_audit wheels FILE --wheels FOLDER   # anywhere: is there sm_75 code for the others

`record` runs whole steps of the preset over a model with two layers of Llama-3.1-8B's shapes while the card says that
it is a T4 (capability 7.5, 40 multiprocessors) to all who choose a kernel by that, and writes down every kernel.
`wheels` looks into the libraries of unpacked wheels with NVIDIA's cuobjdump (`pip install nvidia-cuda-cuobjdump`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import presets
from .benchmark import versions

CAPABILITY, MULTIPROCESSORS = (7, 5), 40
SHARED_BYTES = 64 * 1024
"""shared memory that one block of a T4 may have"""
FOREIGN = re.compile(r"\.(?:bf16|e[45]m[23])\w*|\bcp\.async|\bmbarrier|\bwgmma|\.target sm_(?!75)")
"""what sm_75 does not have, as PTX writes it"""


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


@contextlib.contextmanager
def compilations(card: Any):
    """A list that fills with (source, options) of each Triton compilation; all are for `card`, whatever is asked."""
    import triton
    import triton.compiler.compiler as compiler

    found, real = [], compiler.compile

    def compile(src, target=None, options=None, **more):
        found.append((src, dict(options or {})))
        return real(src, target=card, options=options, **more)

    owners = triton, triton.compiler, compiler
    for owner in owners:
        owner.compile = compile
    try:
        yield found
    finally:
        for owner in owners:
            owner.compile = real


def record(file: Path, model: str, layers: int) -> dict[str, Any]:
    """Two steps of the preset at its own lengths, then a short one under torch's profiler."""
    import torch
    import triton
    from torch.profiler import ProfilerActivity, profile

    from . import enable_standby, load, train
    from .measure import alternating
    from .shapes import write_checkpoint

    enable_standby()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, where they are seen
    settings = presets.LLAMA31_8B_T4.replace(
        max_steps=2, report_to=(), log_completions=False, save_minutes=None, sdpa_backend="efficient",
        output_dir=tempfile.mkdtemp(), model_name_or_path=f"{tempfile.gettempdir()}/t4_audit_{model}_{layers}",
    )  # fmt: skip
    write_checkpoint(model, settings.model_name_or_path, num_hidden_layers=layers)
    real = triton.runtime.driver.active.get_current_target()
    words = [f"w{10 + i * 7 % 400}" for i in range(300)]
    rows = [{"prompt": " ".join(words[i:])} for i in range(4)]
    with posing_as_t4(), compilations(real) as found:
        policy = load(settings)
        train(policy, rows, [alternating], settings)
        policy.sample(rows[:1], temperature=0)
        policy.sample(rows[:1], n=2, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=8)
        short = settings.replace(max_steps=1, max_completion_length=64)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            train(policy, rows, [alternating], short)
    kernels: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count = kernels.setdefault(event.name, [0, 0.0])
            count[0] += 1
            count[1] = round(count[1] + event.time_range.elapsed_us(), 1)
    specs = {json.dumps(spec, sort_keys=True, default=repr): spec for spec in (specification(*each) for each in found)}
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    result = {
        "versions": versions() + f", triton {triton.__version__}, {torch.cuda.get_device_name()}",
        "triton": list(specs.values()),
        "kernels": {name: kernels[name] for name in sorted(kernels)},  # launches and microseconds of the last step
        "libraries": sorted(Path(path).name for path in mapped if has_device_code(path)),
    }
    file.write_text(json.dumps(result, indent=1, default=repr))
    return result


def has_device_code(path: str) -> bool:
    try:
        return b".nv_fatbin" in Path(path).read_bytes()
    except OSError:
        return False


def specification(src: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A compilation as JSON: where the function is, its signature, constants and attributes, and the options."""
    keep = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl", "debug")
    return {
        "module": src.fn.fn.__module__,
        "name": src.fn.fn.__qualname__,
        "source": src.fn.src if "_inductor" in src.fn.fn.__module__ else None,
        "signature": src.signature,
        "constants": [[list(key), plain(value)] for key, value in src.constants.items()],
        "attrs": [[list(key), value] for key, value in src.attrs.items()],
        "options": {key: options[key] for key in keep if options.get(key) is not None},
    }


def plain(value: Any) -> Any:
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if type(value).__name__ == "dtype":
        return {"dtype": str(value)}
    if type(value).__name__ in ("JITFunction", "ConstexprFunction"):
        return {"function": [value.fn.__module__, value.fn.__qualname__]}
    return value


# --- triton: anywhere ----------------------------------------------------------------------------------------


def compile_for_t4(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each specification compiled for sm_75, down to machine code.

    `shared`: bytes of shared memory; `matrix_units`: whether its `tl.dot` runs on them, None without one; `problem`: ""
    if a T4 can run it.
    """
    results = []
    for spec in specs:
        row = {"name": spec["name"], "options": spec["options"], "shared": None, "matrix_units": None, "problem": ""}
        try:
            row |= compiled(spec)
        except Exception as error:  # whatever the compiler raises is the finding
            row["problem"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        results.append(row)
    return results


def compiled(spec: dict[str, Any]) -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def value(given):
        if isinstance(given, dict) and "dtype" in given:
            return tl.dtype(given["dtype"])
        return function(*given["function"]) if isinstance(given, dict) else given

    source = ASTSource(
        generated(spec) if spec["source"] else function(spec["module"], spec["name"]),
        spec["signature"],
        {tuple(key): value(given) for key, given in spec["constants"]},
        {tuple(key): given for key, given in spec["attrs"]},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 75, 32), options=spec["options"])
    foreign = sorted(set(FOREIGN.findall(kernel.asm["ptx"])))
    problem = f"sm_75 lacks {', '.join(foreign)}" if foreign else ""
    if kernel.metadata.shared > SHARED_BYTES:
        problem = f"{kernel.metadata.shared} bytes of shared memory, a T4 has {SHARED_BYTES}"
    dot = "tt.dot" in kernel.asm["ttir"]
    units = "mma.sync" in kernel.asm["ptx"] if dot else None
    return {"shared": kernel.metadata.shared, "matrix_units": units, "problem": problem}


def function(module: str, name: str) -> Any:
    """A @triton.jit function, from under its autotuner or heuristics."""
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    while not hasattr(found, "src"):
        found = found.fn
    return found


def generated(spec: dict[str, Any]) -> Any:
    """A function that torch.compile wrote, from its source."""
    folder = Path(tempfile.mkdtemp())
    (folder / "generated.py").write_text(GENERATED + spec["source"])
    module = importlib.util.spec_from_file_location("generated", folder / "generated.py")
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    shutil.rmtree(folder)
    return getattr(loaded, spec["name"])


GENERATED = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math

@triton.jit
"""


# --- wheels: anywhere ----------------------------------------------------------------------------------------


def code_in_wheels(recorded: dict[str, Any], folder: Path, cuobjdump: str) -> tuple[list[dict], dict[str, str]]:
    """Where sm_75 code lies for each recorded kernel that Triton did not make; and each library's architectures.

    Found is a kernel if a library holds machine code for sm_75 under its name; `exact` says whether with the same
    template arguments (another version of torch may write those otherwise). cuBLAS chooses among its kernels by the
    card, so its names are not looked for: its library must hold sm_75 code.
    """
    exact: dict[str, str] = {}
    stems: dict[str, str] = {}
    architectures = {}
    wanted = {name.split(".")[0] for name in recorded["libraries"]}
    for file in sorted(path for path in folder.rglob("*.so*") if path.name.split(".")[0] in wanted):
        listed = run(cuobjdump, "--list-elf", str(file))
        names = sorted(set(re.findall(r"sm_\w+", listed)), key=lambda arch: int(re.findall(r"\d+", arch)[0]))
        architectures[file.name] = ", ".join(names) or "no device code"
        symbols = run("c++filt", stdin=run(cuobjdump, "-symbols", "-arch", "sm_75", str(file)))
        for line in symbols.splitlines():
            if "ENTRY" in line:
                name = line.split("ENTRY", 1)[1].strip()
                exact.setdefault(normal(name), file.name)
                stems.setdefault(stem(name), file.name)
    triton = {spec["name"] for spec in recorded["triton"]}
    rows = []
    for name, (launches, microseconds) in recorded["kernels"].items():
        if name in triton or name.startswith(("Memcpy", "Memset")):
            continue
        row = {"name": name, "launches": launches, "microseconds": microseconds, "exact": normal(name) in exact}
        row["library"] = exact.get(normal(name)) or stems.get(stem(name), "")
        rows.append(row)
    return rows, architectures


def normal(name: str) -> str:
    """A kernel's name as every demangler writes it."""
    return re.sub(r"\s+|\bvoid |(?<=\d)u?l+\b", "", re.sub(r"\((?:int|bool|unsigned int|unsigned long)\)", "", name))


def stem(name: str) -> str:
    """The name without template and call arguments."""
    return re.split(r"[<(]", re.sub(r"^void |\(anonymous namespace\)::", "", name))[0].strip()


def run(*command: str, stdin: str | None = None) -> str:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


# --- command line --------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "triton", "wheels"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="llama31_8b", help="record: one of colab_kit.shapes")
    parser.add_argument("--layers", type=int, default=2, help="record: so many of its layers")
    parser.add_argument("--wheels", type=Path, help="wheels: folder with the unpacked wheels")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    options = parser.parse_args(arguments)
    if options.what == "record":
        result = record(options.file, options.model, options.layers)
        print(f"{len(result['triton'])} Triton kernels compiled, {len(result['kernels'])} kernels in a step")
        return 0
    recorded = json.loads(options.file.read_text())
    if options.what == "triton":
        rows = compile_for_t4(recorded["triton"])
        for row in rows:
            units = {True: "matrix units", False: "no matrix units", None: ""}[row["matrix_units"]]
            print(f"{row['problem'] or 'ok'}  {row['name']}  {row['shared']} bytes shared  {units}  {row['options']}")
        return int(any(row["problem"] for row in rows))
    rows, architectures = code_in_wheels(recorded, options.wheels, options.cuobjdump)
    for name, found in architectures.items():
        print(f"{name}: {found}")
    for row in rows:
        print(f"{row['library'] or 'NOT FOUND'}{'' if row['exact'] else ' (by stem)'}  {row['name'][:150]}")
    return int(not all(row["library"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
