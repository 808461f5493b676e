# make demo: a language model learns on this machine's CPU.   make test: the tests.   Nothing else is needed first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test lint soak learning colab-like clean

# Made anew when the pins change; `preflight` turns a wrong combination of packages into one clear line.
$(VENV)/.ready: requirements-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps -r requirements-cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m colab_kit.preflight
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python -m colab_kit.demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Two minutes of steps with every fault: is anything lost, does memory grow?
soak: $(VENV)/.ready
	$(BIN)/python -m colab_kit.soak --minutes 2

# Three seeds of the quickstart's own cells: does the mean reward rise by a fifth of its range?
learning: $(VENV)/.ready
	$(BIN)/python -m colab_kit.demo --seeds 3

clean:
	rm -rf $(VENV) outputs build *.egg-info

# The install cell and the quickstart in an environment with Colab's own preloaded versions; 4 GB of disk.
colab-like:
	PYTHON=$(PYTHON) tests/colab_like.sh
