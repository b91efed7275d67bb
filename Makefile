# One verb each. Everything runs in .venv, made on first use, with what the verb needs: the demo Python 3.11 or newer and
# make, the tests a C++ compiler too.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
INSTALLED := .venv/.installed
LOWEST := .cache/lowest/.installed
DOCS := .cache/docs/.installed

# What a score and its gradient depend on, and what each library with a floor is asked for.
HEART := tests/batching/test_shared.py tests/batching/test_collator.py tests/modeling/test_architectures.py \
  tests/modeling/test_freezing.py tests/modeling/test_last_layer.py tests/modeling/test_reward_model.py \
  tests/modeling/test_sight.py tests/test_libraries.py tests/test_rendering.py tests/scoring/test_scorer.py \
  tests/data/test_media.py tests/serving/test_fetch.py tests/serving/test_access.py \
  tests/serving/test_fuzz.py tests/serving/test_redis.py tests/training/test_training.py

# Tools that find each other on PATH: ninja for DeepSpeed, torchrun for the launch scripts.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help demo frames-demo test test-all lowest resolve constraints neighbours neighbours-check lint format types bench gpu docs
.DEFAULT_GOAL := help

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s%s\n", $$1, $$2}' Makefile

demo: $(DEMO)  ## train, sweep and score on the bundled digits
	$(BIN)/vlmrm demo

frames-demo: $(INSTALLED)  ## collect frames of Acrobot, train a classifier, measure it and its reward
	$(BIN)/vlmrm frames demo

test: $(INSTALLED)  ## run the tests of little work, in minutes (T=tests/batching: those of a folder or file)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --cheap --workers 3 $(GUARD) $(T)

# Three and four at a time even on two cores: many wait for servers and processes more than they compute.
test-all: $(INSTALLED)  ## run every test (T=tests/batching: those of a folder or file)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers 4 $(REST) $(T)

lowest: $(LOWEST)  ## run the heart's tests with the lowest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -q --workers 4 $(HEART)

resolve: $(INSTALLED)  ## resolve the core beside the trainers of others, without installing
	$(BIN)/python drives/resolving/resolve.py

constraints: $(INSTALLED)  ## write the versions of .venv into constraints.txt, once they are tested
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable | grep -E '^[A-Za-z0-9._-]+==[^ ]+$$' \
	  | sed 's/+.*//' > constraints.txt

neighbours: $(INSTALLED)  ## drive the reward paths of other frameworks, and write docs/rewards.md's table of what was proved
	OMP_NUM_THREADS=1 $(BIN)/python drives/neighbours/drive.py
	$(BIN)/python drives/neighbours/table.py

neighbours-check: $(INSTALLED)  ## drive those that CI has, and fail where the table says otherwise
	OMP_NUM_THREADS=1 $(BIN)/python drives/neighbours/drive.py trl ms_swift verl openrlhf cosmos
	$(BIN)/python drives/neighbours/table.py --check

lint: $(INSTALLED)  ## check style, formatting, and that imports point down the storeys
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.:packages/robots $(BIN)/lint-imports --no-cache --no-logo
	cd packages/robots && PYTHONPATH=../..:. ../../$(BIN)/lint-imports --no-cache --no-logo

format: $(INSTALLED)  ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)  ## check types
	$(BIN)/ty check vlmrm packages/robots/vlmrm_robots

bench: $(INSTALLED)  ## run every benchmark
	$(BIN)/python -m benchmarks

# With the Python of the machine, unless there is a .venv: one that is lent has torch, and no network to install from.
gpu:  ## measure what waits for a GPU (PART=profile, SECONDS=540, OUTPUT=), with ./wheels where there is no network
	$(if $(wildcard wheels),$(PYTHON) -m benchmarks.wheels install wheels --into build/gpu/site)
	PYTHONPATH=build/gpu/site:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu $(PART:%=--part %) $(SECONDS:%=--seconds %) $(OUTPUT:%=--output %)

docs: $(DOCS)  ## build the documentation into site/; a broken link or anchor fails
	rm -rf site
	find .cache -maxdepth 1 -type f -delete  # pages built before; --clean would delete the environments in .cache too
	$(<D)/bin/zensical build --strict
	$(<D)/bin/python docs/check_links.py site

NEW_ENOUGH = @$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'vlmrm needs Python 3.11 or \
newer, and $(PYTHON) is %d.%d: name another, such as make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)' % sys.version_info[:2])"
INSTALL = $(BIN)/uv pip install --system-certs --python $(BIN)/python --constraint constraints.txt --editable

# The stamp is made last: an install that fails, or is interrupted, is tried again.
$(DEMO): pyproject.toml constraints.txt
	$(NEW_ENOUGH)
	@echo "Installing into .venv what training needs: a download of 3.2 GB, 98 packages, 6.4 GB on the disk. Most of it is torch"
	@echo "with CUDA: UV_TORCH_BACKEND=cpu in the environment takes torch for the CPU, from PyTorch's own index."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(INSTALL) '.[train]'
	touch $@

$(INSTALLED): $(DEMO) packages/robots/pyproject.toml
	@echo "Installing into .venv what development needs as well: some 100 packages, 1 GB"
	$(INSTALL) '.[dev]' --editable 'packages/robots[dev]'
	touch $@

# Without constraints.txt, which pins the versions of the day.
$(LOWEST): pyproject.toml packages/robots/pyproject.toml
	$(NEW_ENOUGH)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(@D)/bin/uv pip install --system-certs --quiet --python $(@D)/bin/python --resolution lowest-direct --editable '.[dev]' \
	  --editable 'packages/robots[dev]'
	touch $@

# The pages are built from the source as text: what the package itself needs is not installed.
$(DOCS): pyproject.toml
	$(NEW_ENOUGH)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c "import tomllib; print(*tomllib.load(open('$<', 'rb'))['project']['optional-dependencies']['docs'])" | \
	  xargs $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
	touch $@
