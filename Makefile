# Everything runs in .venv, made from PyPI by name. Models on CPUs need no PyTorch, but tests compare with it. Without an
# NVIDIA device, pip gets a CPU build of PyTorch if one of its indexes has one. TORCH_BACKEND=cpu gets a CPU build in any
# case, through uv, which knows PyTorch's own indexes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASE := $(VENV)/release/bin
DOCS := $(VENV)/docs
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
ifdef TORCH_BACKEND
INSTALL = $(PIP) uv && $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend $(TORCH_BACKEND)
else
INSTALL = $(PIP) $$($(BIN)/python .ci/cpu_torch.py)
endif
# The extra `gpu` brings PyTorch.
comma := ,
EXTRAS := all$(if $(wildcard /dev/nvidiactl),$(comma)gpu)
# Installations with pip and uv during a check get the same build of PyTorch.
WITH_CPU_TORCH = PIP_CONSTRAINT=$(abspath $(VENV)/constraints.txt) UV_CONSTRAINT=$(abspath $(VENV)/constraints.txt)

.PHONY: up chat test nightly outside lint style types bytecode bench bench-all bench-long dist check-install docs lock clean

up: $(VENV)/.installed
	$(BIN)/helexa up

chat: $(VENV)/.installed
	$(BIN)/helexa chat

# Tests start some hundred processes, which would compile helexa each time if none may leave what it compiled. On one or
# two CPUs, one more worker computes while the others wait for processes. `nproc` prints OMP_NUM_THREADS if it is set, so
# only the tests get it. Status 1: tests failed, and all tests were run.
TEST_ENVIRONMENT = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --jobs=2 --output-sync style types bytecode
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $$(( $$(nproc) < 3 ? $$(nproc) + 1 : 4 )) --dist loadfile \
		--no-loadscope-reorder --max-worker-restart 0 $(TESTS) || \
		{ [ $$? = 1 ] && $(TEST_ENVIRONMENT) $(BIN)/python .ci/second_run.py; }

# All tests with many more random cases, then the install paths and outside programs: hours.
nightly:
	$(MAKE) $(VENV)/constraints.txt
	HELEXA_NIGHTLY=1 $(WITH_CPU_TORCH) $(MAKE) test TESTS="-m '' --timeout 7200"
	$(MAKE) check-install
	$(MAKE) outside

# Outside programs against the whole stack; not in CI. PART=sdk or ONLY=codex runs some of them: see CONTRIBUTING.md.
outside: $(VENV)/.installed-test
	PYTHONPATH=tests:tests/unit:tests/integration:tests/e2e $(BIN)/python outside/run.py --environments $(VENV)/outside \
		$(if $(PART),--part $(PART)) $(if $(ONLY),--only "$(ONLY)"); \
	status=$$?; $(BIN)/python outside/clients_table.py && exit $$status

lint: $(VENV)/.installed-test
	$(MAKE) --no-print-directory --jobs=2 --output-sync style types

style: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/lint-imports --no-cache --config import-circles.toml
	$(BIN)/python tools/check_prose.py

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

# All workers of pytest import the same thousands of modules at once. After an installation, each worker would compile all
# of them, so one process does it first, on the CPU that pyright leaves idle.
bytecode: $(VENV)/.installed-test
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest --collect-only -qq $(TESTS) > $(VENV)/collected.txt || \
		{ cat $(VENV)/collected.txt; exit 1; }

PEERS ?= --install-peers $(VENV)/peers
COMPARE = $(BIN)/python perf/compare.py $(PEERS)
TURNS ?= 3
WIDE = "helexa 16-bit cache=$(BIN)/python perf/engine.py --kv-dtype unquantized"

bench: $(VENV)/.installed
	$(COMPARE) helexa/small --out $(VENV)/benchmark.json

# The tables of two models, in one sitting of about 15 minutes. LARGE is a GGUF file, for example of
# Qwen2.5-Coder-1.5B-Instruct.
bench-all: $(VENV)/.installed
	$(COMPARE) helexa/small --turns $(TURNS) --out $(VENV)/benchmark-small.json \
		--rows decode@1,decode@4,decode@16,decode@32,sampled@1,sampled@4,sampled@16,prefill@512
	$(COMPARE) $(LARGE) --turns $(TURNS) --out $(VENV)/benchmark-large.json \
		--rows decode@1,decode@8,decode@16,sampled@1,sampled@4,sampled@16,prefill@512

# Long contexts of LONG, a GGUF file of a model with 32,768 positions, for example of Qwen2.5-Coder-0.5B-Instruct. The
# longest prompt takes several minutes in each engine.
bench-long: $(VENV)/.installed
	$(COMPARE) $(LONG) --turns 1 --out $(VENV)/benchmark-long.json --engine $(WIDE) \
		--rows decode@1,decode@1:2048,decode@1:8192,decode@1:32700,prefill@2048,prefill@8192,prefill@32700

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
	@echo "Installing helexa into $(VENV)."
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

# Tests compile what they import; all that there is takes longer.
$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(INSTALL) --no-compile -e '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/constraints.txt: .ci/cpu_torch.py | $(BIN)/python
	$(BIN)/python .ci/cpu_torch.py > $@

$(VENV)/release/.installed: Makefile
	$(PYTHON) -m venv $(VENV)/release
	$(RELEASE)/python -m pip install -q --disable-pip-version-check build check-wheel-contents 'mkdocs<2' mkdocs-material pipx twine uv
	@touch $@

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .import_linter_cache
