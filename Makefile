# Every target sets up what it needs: a fresh clone and Python >= 3.11 are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests benchmarks docs conftest.py

.PHONY: help demo test test-slow test-gpu lint format figures bench bench-gpu clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# pip's own progress bar shows how far the 2 GB of torch are
$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.train

demo: $(VENV)/.train  ## four labels and losses, cross-validated on phantoms and compared; a few minutes
	$(BIN)/semidice demo

# a Chromium for the tests of the report page: found, installed where that needs no password, or one line that says how
$(VENV)/.browser: tests/support/browser.py $(VENV)/.dev
	@$(BIN)/python tests/support/browser.py
	@touch $@

test: $(VENV)/.dev $(VENV)/.browser lint  ## everything a change must pass: format, lint, types, imports, doctests, tests
	$(BIN)/pytest -q -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

test-slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/pytest -q -m slow

test-gpu: $(VENV)/.dev  ## the tests that need a CUDA device
	$(BIN)/pytest -q -m gpu

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

figures: $(VENV)/.dev  ## make every figure and table of the documentation anew
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/recipe_table.py

bench: $(VENV)/.dev  ## time and memory of the losses on the CPU, against peers, into docs/performance.md
	$(BIN)/python benchmarks/bench_loss.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_memory.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_data.py --docs docs/performance.md

bench-gpu: $(VENV)/.dev  ## the same on a CUDA device, the KDE kernel, batches and the training step
	$(BIN)/python benchmarks/bench_loss.py --device cuda --compiled --docs docs/performance.md
	$(BIN)/python benchmarks/bench_classes.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_kde.py --device cuda
	$(BIN)/python benchmarks/bench_data.py --device cuda --docs docs/performance.md
	$(BIN)/python benchmarks/bench_training.py --docs docs/performance.md

clean:  ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo_out bench_out
