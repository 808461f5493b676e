#!/usr/bin/env bash
# A Colab-like environment: what Colab has preloaded at its versions, as far as a CPU has it, on Python 3.11 or newer.
# In it the notebooks' own install cell runs, and then the quickstart. Needs about 4 minutes, and 4 GB of disk.
#     tests/colab_like.sh [FOLDER]      the environment goes to FOLDER (default: .venv-colab) and is made anew
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-colab}
started=$SECONDS
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
bin=$(cd "$venv/bin" && pwd)
export PATH="$bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1 COLAB_KIT_CI=1 OMP_WAIT_POLICY=PASSIVE
export JUPYTER_PATH="$bin/../share/jupyter" PYTHONWARNINGS=ignore PYDEVD_DISABLE_FILE_VALIDATION=1

# Builds for CUDA are left out, all but torch, whose CPU build stands for them. UNLISTED is what the rest needs.
grep -vE '^#|^torch|\+|^(cuda|nvidia|nvtx|triton)' tests/data/colab_preloaded.txt > "$venv/preloaded.txt"
UNLISTED="distro entrypoints jedi nbclassic pytz jupyter-console"
pip install --quiet --no-deps --no-compile -r "$venv/preloaded.txt" torchao==0.10.0 $UNLISTED
pip install --quiet --no-deps "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
echo "preloaded: $(pip list 2>/dev/null | wc -l) packages, $((SECONDS - started)) s"

# The repository that the install cell names is this one.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$PWD.insteadOf"
GIT_CONFIG_VALUE_0="https://github.com/$(python - <<'PY'
import tomllib
print("/".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["urls"]["Repository"].split("/")[-2:]))
PY
)"
export GIT_CONFIG_VALUE_0

work=$(mktemp -d)
cat > "$work/execute.py" <<'PY'
"""Execute cells of a notebook with this environment's kernel: all of them, or the one that installs."""
import sys
from importlib import metadata

import nbformat
from nbclient import NotebookClient

KEPT = ("numpy", "pillow", "ipython", "ipykernel", "ipywidgets")
path, which, folder = sys.argv[1:]  # the kernel runs in `folder`, from where the checkout can't be imported
notebook = nbformat.read(path, as_version=4)
if which == "install":
    notebook.cells = [cell for cell in notebook.cells if cell.source.startswith("# @title Install")]
    assert len(notebook.cells) == 1


class Client(NotebookClient):
    def process_message(self, message, cell, index):
        if message["msg_type"] == "stream":
            sys.stdout.write(message["content"]["text"])
            sys.stdout.flush()
        return super().process_message(message, cell, index)


before = {name: metadata.version(name) for name in KEPT}
Client(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
after = {name: metadata.version(name) for name in KEPT}
print(f"{path}, {which}: passed; {', '.join(f'{n} {v}' for n, v in after.items())}")
assert after == before == dict(
    line.split("==") for line in open("tests/data/colab_preloaded.txt").read().split() if line.split("==")[0] in KEPT
), before
PY
python "$work/execute.py" notebooks/llama31_8b_qlora_t4.ipynb install "$work"
! pip show --quiet torchao 2>/dev/null || { echo "torchao is still there"; exit 1; }
(cd "$work" && python -m colab_kit.preflight)
[ ! -e notebooks/quickstart.ipynb ] || python "$work/execute.py" notebooks/quickstart.ipynb all "$work"
rm -rf "$work"
echo "1 passed, 0 failed"
echo "colab-like: passed in $((SECONDS - started)) s"
