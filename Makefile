# make install   a virtual environment in .venv with the package and its test extras; quick when nothing changed
# make demo      the main job on this machine, with or without a GPU: compare the schedules, then train
# make test      lint, then all tests at 1, 2 and 4 ranks
# make lint      ruff and mypy
#
# PYTHON=/path/to/python3.12 names an interpreter for the virtual environment; otherwise one is looked for.

.DEFAULT_GOAL := install
.PHONY: install demo test lint clean
.DELETE_ON_ERROR:

# One thread per rank: several ranks share the cores, and thread pools that fight make every run slower.
export OMP_NUM_THREADS ?= 1

BIN := .venv/bin
STAMP := .venv/.installed
# --standalone picks a free port, so that two demos can run at once.
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node 2
DEMO_RUNS := runs/demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/find_python.sh
	@PYTHON="$(PYTHON)" sh scripts/make_venv.sh
	@touch $@

demo: install
	@echo "== compare: Megatron's default schedule, its built-in combined schedule, and this package =="
	@$(TORCHRUN) -m combined_1f1b compare --config examples/tiny_moe.yaml output=$(DEMO_RUNS)/compare
	@echo "== train: watch the loss fall =="
	@$(TORCHRUN) -m combined_1f1b train --config examples/tiny_moe.yaml output=$(DEMO_RUNS)/train

test: lint
	@$(BIN)/python tests/run_tests.py

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf .venv build dist runs
