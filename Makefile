# Everything runs in .venv, made from PyPI by name. torch comes through pip, whose index may offer the CPU build.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: up chat test lint bench clean

up: $(STAMP)
	$(BIN)/helexa up

chat: $(STAMP)
	$(BIN)/helexa chat

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/python benchmarks/engine.py helexa/small

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[all,test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
