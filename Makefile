# One verb each. Everything runs in .venv, made on first use; only Python, make and a C compiler are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format types bench

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(BIN)/.installed  ## train, sweep and score on the bundled digits
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/vlmrm demo

test: $(BIN)/.installed  ## every test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(BIN)/.installed
	$(BIN)/ty check vlmrm

bench: $(BIN)/.installed  ## every benchmark
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks
