# make demo   virtual environment, install of what it needs, a log of offers to a decision, and its truth
# make cartpole  a policy learned from 30 000 random transitions of CartPole, played in simulation
# make test   everything CI runs: format, lint, types, tests
# make gpu    on a machine with a GPU: its tests and figures in less than ten minutes, to outputs/gpu.json
# make docs   the guides as a site, every link checked: outputs/docs/index.html
# make setup  .venv alone
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a GPU and a toolkit to build PyCUDA with, or nothing
CUDA := $(shell command -v nvcc >/dev/null 2>&1 && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo ,cuda)

# of the tests: two more than cores, as tests of several processes mostly wait; 4 at most
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 2))')

.PHONY: setup demo cartpole test lint tests slow benchmark gpu docs clean

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
	$(BIN)/python -m workflows.dqn --config configs/offers/dqn.json
	$(BIN)/python configs/offers/shop.py play outputs/offers/model

cartpole: $(VENV)/.installed
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

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) outputs
