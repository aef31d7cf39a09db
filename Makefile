PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
INSTALLED := $(abspath $(VENV))/installed

.PHONY: help compare test lint format types clean

help:
	@echo 'make compare  train a small GPT with each compressor        (ARGS="--steps 50")'
	@echo 'make test     run the tests                                 (ARGS="-k powersgd")'
	@echo 'make lint     ruff: rules and format'
	@echo 'make format   ruff: repair both'
	@echo 'make types    mypy, on the installed package'
	@echo 'make clean    remove $(VENV) and what tools leave behind'
	@echo 'The first one makes $(VENV) with $(PYTHON); VENV=... and PYTHON=... choose others.'

$(STAMP): pyproject.toml setup.py
	@echo 'installing gradwire and its tools into $(VENV): a few minutes where torch is downloaded'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

compare: $(STAMP)
	@$(BIN)/gradwire compare $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# A real installation beside the editable one: mypy does not follow the mapping of folders to packages.
types: $(STAMP)
	@rm -rf build $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target $(INSTALLED) .
	@cd $(INSTALLED) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache --package gradwire

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
