# Every target installs what it needs: a fresh clone and Python >= 3.11 are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
LOWEST_TESTS := tests/networks tests/data tests/recipes tests/losses/test_losses.py tests/metrics tests/prediction tests/training tests/test_compare.py
SOURCES := src tests benchmarks docs conftest.py

.PHONY: help demo test test-slow test-lowest test-gpu test-nnunet test-integrations test-wheel docs find results audit lint format figures bench bench-gpu clean
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# no -q: pip's progress bar shows the download of torch, 2 GB
$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.train

demo: $(VENV)/.train  ## compare four methods on phantoms; a few minutes
	$(BIN)/semidice demo

# Chromium for the tests of the report page: use an installed one, or install it; if this needs a password, say how
$(VENV)/.browser: tests/support/browser.py $(VENV)/.dev
	@$(BIN)/python tests/support/browser.py
	@touch $@

test: $(VENV)/.dev $(VENV)/.browser lint  ## all checks of a change: format, lint, types, imports, doctests, tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/python -m ruff format --check $(SOURCES)
	$(BIN)/python -m ruff check $(SOURCES)
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# WORDS=resume make find
find:  ## where a behaviour is tested, by words of the test's name
	@grep -rnE "def test_\w*$(WORDS)" tests

test-slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

# an environment of its own with the lowest version of each package that pyproject.toml allows
$(LOWEST)/.dev: pyproject.toml tests/support/lowest_versions.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tests/support/lowest_versions.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[train,monai]' beartype hypothesis pytest scikit-learn SimpleITK
	@touch $@

# old packages warn of each other, so warnings are no errors here
test-lowest: $(LOWEST)/.dev  ## the tests that use other packages, with the lowest allowed versions of them
	$(LOWEST)/bin/python -m pytest -q -o filterwarnings=default $(LOWEST_TESTS)

test-gpu: $(VENV)/.dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

# nnU-Net needs an older timm than the one that is tested, so it has an environment of its own on top of the first one
$(VENV)/.nnunet: $(VENV)/.dev
	$(PYTHON) -m venv $(VENV)/nnunet
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(VENV)/nnunet/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	grep -v '^timm==' constraints.txt > $(VENV)/nnunet/constraints.txt
	$(VENV)/nnunet/bin/python -m pip install --disable-pip-version-check -c $(VENV)/nnunet/constraints.txt -e . 'nnunetv2==2.8.1'
	@touch $@

test-nnunet: $(VENV)/.nnunet  ## our trainer in the real nnU-Net; ten minutes
	$(VENV)/nnunet/bin/python -m pytest -q -m nnunet tests/nnunet

# packages of the frameworks that semidice/integrations is for, in an environment of their own on top of the first one
$(VENV)/.integrations: $(VENV)/.dev
	$(PYTHON) -m venv $(VENV)/integrations
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(VENV)/integrations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	$(VENV)/integrations/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[lightning,huggingface,onnx,mlflow,wandb,dicom,ray]' 'monai[fire,ignite]'
	@touch $@

test-integrations: $(VENV)/.integrations  ## the adapters, each with its real framework
	$(VENV)/integrations/bin/python -m pytest -q -m integrations

# an environment that builds; the one that tests the wheel is made anew each time, and finds torch in the first one
$(VENV)/.build: constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/build
	$(VENV)/build/bin/python -m pip install --disable-pip-version-check -c constraints.txt build
	@touch $@

test-wheel: $(VENV)/.build $(VENV)/.train  ## build wheel and sdist, and use the wheel and each extra alone in empty environments; an hour
	$(VENV)/build/bin/python tests/support/check_wheel.py --parent "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# examples of the site use the frameworks, so Sphinx is in their environment
$(VENV)/.docs: $(VENV)/.integrations
	$(VENV)/integrations/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs $(VENV)/.browser  ## the documentation as a site in build/site, and its tests in a browser
	$(VENV)/integrations/bin/python docs/results_page.py
	$(VENV)/integrations/bin/python docs/build_site.py
	$(VENV)/integrations/bin/python -m pytest -q -m site tests/site

# DATA has lidc, hippocampus and tf_efficientnet_lite0.safetensors; RESULTS=labels ON=local:16 make results: one study
RESULTS ?= labels systems distillation bandwidth raters
DATA ?= data
results: $(VENV)/.dev  ## train the studies of docs/results.md again on DATA; an hour on a GPU
	$(BIN)/python docs/results_study.py run $(RESULTS) --lidc $(DATA)/lidc --hippocampus $(DATA)/hippocampus --weights $(DATA)/tf_efficientnet_lite0.safetensors --work results_out --out results_out/stored $(if $(ON),--on $(ON))

# in an environment of its own: what pip-audit needs is not audited
$(VENV)/.audit: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --disable-pip-version-check 'pip-audit>=2.9'
	@touch $@

# AUDIT='--ignore-vuln ID' make audit: leave one out
audit: $(VENV)/.dev $(VENV)/.audit  ## compare the installed packages with known vulnerabilities
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps -r $(VENV)/audit/installed.txt $(AUDIT)

format: $(VENV)/.dev  ## rewrite the sources in the project's format
	$(BIN)/python -m ruff format $(SOURCES)
	$(BIN)/python -m ruff check --fix $(SOURCES)

figures: $(VENV)/.dev  ## make all figures and tables of the documentation again
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/recipe_table.py
	$(BIN)/python docs/first_hour.py

bench: $(VENV)/.dev  ## time and memory of the losses on the CPU, for docs/performance.md
	$(BIN)/python benchmarks/bench_loss.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_memory.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_data.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_large.py --docs docs/performance.md

bench-gpu: $(VENV)/.dev  ## time of losses, KDE, batches and training step on a CUDA device
	$(BIN)/python benchmarks/bench_loss.py --device cuda --compiled --docs docs/performance.md
	$(BIN)/python benchmarks/bench_classes.py --docs docs/performance.md
	$(BIN)/python benchmarks/bench_kde.py --device cuda
	$(BIN)/python benchmarks/bench_data.py --device cuda --docs docs/performance.md
	$(BIN)/python benchmarks/bench_training.py --docs docs/performance.md

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo_out results_out bench_out dist build
