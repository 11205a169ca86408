# Everything runs in .venv, made from PyPI by name; torch comes through pip, so an index of CPU builds is honoured.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASE := $(VENV)/release/bin
DOCS := $(VENV)/docs
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

.PHONY: up chat test nightly outside lint bench dist check-install docs lock clean

up: $(VENV)/.installed
	$(BIN)/helexa up

chat: $(VENV)/.installed
	$(BIN)/helexa chat

# Tests start some hundred processes, which would compile helexa each time if none may leave what it compiled.
test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

# All tests with many more random cases, then the install paths and outside programs: hours.
nightly:
	HELEXA_NIGHTLY=1 $(MAKE) test TESTS="-m '' --timeout 7200"
	$(MAKE) check-install
	$(MAKE) outside

# Outside programs against the whole stack; not in CI. PART=sdk or ONLY=codex runs some of them: see CONTRIBUTING.md.
outside: $(VENV)/.installed-test
	PYTHONPATH=tests:tests/unit:tests/integration:tests/e2e $(BIN)/python outside/run.py --environments $(VENV)/outside \
		$(if $(PART),--part $(PART)) $(if $(ONLY),--only "$(ONLY)"); \
	status=$$?; $(BIN)/python outside/clients_table.py && exit $$status

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/lint-imports --no-cache --config import-circles.toml
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed
	$(BIN)/python perf/compare.py helexa/small --install-peers $(VENV)/peers --out $(VENV)/benchmark.json

# The source distribution, and a wheel for this machine type with prebuilt kernels.
dist: $(VENV)/release/.installed
	rm -rf dist
	HELEXA_PREBUILT_KERNELS=1 $(RELEASE)/python -m build --outdir dist .
	$(RELEASE)/twine check --strict dist/*
	$(RELEASE)/check-wheel-contents dist/*.whl

# Each way to install the wheel reaches a first answer without a C compiler.
check-install: dist
	$(RELEASE)/python .ci/install_paths.py dist $(RELEASE)

# The documentation as a web site with search, in $(DOCS)/site.
docs: $(VENV)/release/.installed
	rm -rf $(DOCS) && mkdir -p $(DOCS)/source
	cp -r *.md docs examples deploy $(DOCS)/source
	NO_MKDOCS_2_WARNING=1 $(RELEASE)/mkdocs build --strict --quiet
	@echo "The start page is $(DOCS)/site/index.html."

# The versions of all dependencies, with hashes, for all supported versions of Python.
lock: $(VENV)/release/.installed
	$(RELEASE)/uv pip compile -q --universal --extra all --generate-hashes --no-header --no-annotate --upgrade \
		--python-version 3.11 --output-file requirements.lock pyproject.toml

$(BIN)/python:
	@echo "Installing helexa into $(VENV); PyTorch takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[all]'
	@touch $@

# Tests compile what they import; all that there is takes longer.
$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(PIP) --no-compile -e '.[all,test]'
	@touch $(VENV)/.installed $@

$(VENV)/release/.installed: Makefile
	$(PYTHON) -m venv $(VENV)/release
	$(RELEASE)/python -m pip install -q --disable-pip-version-check build check-wheel-contents 'mkdocs<2' mkdocs-material pipx twine uv
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .import_linter_cache
