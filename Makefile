# Everything runs in .venv, made from PyPI by name; torch comes through pip, so an index of CPU builds is honoured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: up chat test lint bench clean

up: $(VENV)/.installed
	$(BIN)/helexa up

chat: $(VENV)/.installed
	$(BIN)/helexa chat

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/compare.py helexa/small --install-peers $(VENV)/peers --out $(VENV)/benchmark.json

$(VENV)/.installed: pyproject.toml
	@echo "Installing helexa into $(VENV); PyTorch takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[all,test]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
