# make demo   virtual environment, install of what it needs, the main job on a log simulated here; ends with the model's path and scores
# make test   everything CI runs: format, lint, types, tests
# make gpu    on a machine with a GPU: its tests and figures in less than ten minutes, to outputs/gpu.json
# make setup  .venv alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a GPU and a toolkit to build PyCUDA with, or nothing
CUDA := $(shell command -v nvcc >/dev/null 2>&1 && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo ,cuda)

# of the tests: two more than cores, as tests of several processes mostly wait; 4 at most
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 2))')

.PHONY: setup demo test lint tests slow benchmark gpu clean

setup: $(VENV)/.ready

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[data,report,compiler,pictures$(CUDA)]'
	@touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev$(CUDA)]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m workflows.simulate --config configs/cartpole/simulate.json
	$(BIN)/python -m workflows.dqn --config configs/cartpole/dqn.json --set simulation.pictures=true

test: lint tests

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tests: setup
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal

slow: setup
	$(BIN)/python -m pytest -m slow

benchmark: setup
	set -e; for name in learner start reading memory simulation cluster timeline normalization sharding serving; do \
	  $(BIN)/python -m tests.benchmarks.$$name; \
	done

gpu: setup
	$(BIN)/python -m tests.benchmarks.gpu outputs/gpu.json

clean:
	rm -rf $(VENV) outputs
