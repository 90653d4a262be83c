# Every target sets up what it needs: a virtual environment in .venv, made once and renewed when
# pyproject.toml or constraints.txt change. `make PYTHON=python3.12 test` chooses the interpreter.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Tests wait for servers and disks now and then: two cores have work for four.
WORKERS ?= 4

# Tests start hundreds of processes: compiled once, the sources are not compiled again by each.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.emberkeep-ready
DOCS_READY := $(VENV)/.emberkeep-docs-ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
CHECKED := src tests benchmarks scripts examples
# A file's tests share servers and what else is costly to start, so one process has all of a file.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo check test soak lint format bench docs dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## train over 8 shards, kill two of them, recover; about two minutes
	@$(BIN)/emberkeep demo

check: lint ## what to run before each commit: ruff, mypy and the unit tests that take no second
	@$(PYTEST) --hypothesis-profile=check -m "not soak and not processes and not long" \
	    tests/unit tests/test_*.py

test: $(READY) ## run all tests but the long ones
	@$(PYTEST) -m "not soak" tests

soak: $(READY) ## run the long random tests
	@$(BIN)/python -m pytest -m soak tests

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/mypy

format: $(READY) ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

bench: $(READY) ## run every benchmark and write benchmarks/results (QUICK=1: short runs, no files)
	@$(PIP) install -c constraints.txt -e '.[bench]' \
	    || echo "make: the peers of the benchmarks cannot be installed here; their rows are left out"
	@for benchmark in benchmarks/[a-z]*.py; do \
	    echo "== $$benchmark"; $(BIN)/python $$benchmark $(if $(QUICK),--quick); \
	done

docs: $(DOCS_READY) ## build the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: build/site/index.html"

dist: $(READY) ## build wheel and source archive into dist, and check what an index would show
	@$(PIP) install -c constraints.txt -e '.[dist]'
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist >/dev/null
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python scripts/check_wheel.py dist

clean: ## remove the virtual environment, caches and build output
	@rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null \
	    || { echo "make: no $(PYTHON) here; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "make: Emberkeep needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	              "name another with: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes if torch must be downloaded)"
# Some systems ship venv without pip: the pip that is there then installs into the new environment.
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	    || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	    || $(PYTHON) -m pip --quiet --python $(BIN)/python install pip
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@
