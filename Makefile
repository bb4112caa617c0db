PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
# Some pins have no wheels for Python 3.10, which then takes what the bounds of pyproject.toml allow.
PINS = $(shell $(PYTHON) -c 'import sys; print("" if sys.version_info < (3, 11) else "-c constraints.txt")')
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check $(PINS)
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal
# Written last, so that an interrupted set-up starts again.
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-quick environments lint types pytest pytest-quick format release clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Run the demonstration
	$(BIN)/bayesify demo

# Types are checked beside the tests, since that takes one core; what fails in either fails the whole.
test: $(READY) ## Run every check
	@$(MAKE) -j2 --no-print-directory lint docs types pytest

test-quick: $(READY) ## Run every check but the tests that take long
	@$(MAKE) -j2 --no-print-directory lint types pytest-quick

# Some gigabytes each the first time: outside of Python 3.11, torch may come with CUDA's libraries.
environments: ## Run the quick tests with Python 3.10 to 3.13, with the lowest and the newest torch
	$(PYTHON) tools/environments.py

lint: $(READY) ## Check style, formatting, imports between folders, and the tables of docs/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m experiments.tables --check

docs: $(READY) ## Build the site of docs/ into site/; a broken link or reference is an error
	$(BIN)/zensical build --strict --clean

types: $(READY) ## Check types
	$(BIN)/mypy

pytest: $(READY) ## Run the tests, the doctests and the code in README.md
	$(PYTEST)

pytest-quick: $(READY)
	$(PYTEST) -m 'not slow'

format: $(READY) ## Fix style and formatting where that is safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `make release ARGS=--dry-run` does everything but the tag.
release: $(READY) ## Build the wheel and the sdist, check them, and tag the version
	$(BIN)/python tools/release.py $(ARGS)

clean: ## Remove the environment, caches and build products
	rm -rf $(VENV) .environments build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torchvision and timm serve tests of architectures only. --no-deps, because the tests need none
# of torchvision's compiled operators.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info[:2] <= (3, 13) else \
	  f"Python 3.10 to 3.13 is needed here, found {sys.version.split()[0]}: set PYTHON=...")'
	@echo "Setting up $(VENV) (about 3 minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[1/3] installing PyTorch"
	@$(PIP_INSTALL) torch
	@echo "[2/3] installing bayesify with its extras and the development tools"
	@$(PIP_INSTALL) -e '.[dev]'
	@echo "[3/3] installing the architectures that the tests use"
	@$(PIP_INSTALL) --no-deps torchvision timm
	@touch $@
