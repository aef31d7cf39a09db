PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PART ?=
OUT ?= gpu-results
SECONDS ?= 600
SEED ?=
WORKERS ?= 3
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
# Tests start many processes, which would compile all modules anew where Python may not keep what it compiled.
PYTEST := PYTHONDONTWRITEBYTECODE= "$(BIN)/python" -m pytest
BESIDE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
INSTALLED := $(abspath $(VENV))/installed
SANITIZED := $(abspath $(VENV))/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all

SITE ?= site

.PHONY: help compare docs wheel test test-all test-rest compiled fuzz mutants gpu conformance asan sanitize lint format words types files clean

help:
	@echo 'make compare  train a small GPT with each compressor, on a slow link and without  (ARGS="--steps 50")'
	@echo 'make docs     the documentation as a site, in $(SITE)/'
	@echo 'make wheel    source distribution and wheel in dist/, tried in a bare environment'
	@echo 'make test     every test, of its variants some: minutes     (ARGS="-k powersgd")'
	@echo 'make test-all all variants of every test, too: an hour; make test-rest some that make test leaves out'
	@echo 'make fuzz     random trainings and failures on real ranks     (SECONDS=600, or SEED=7 for one)'
	@echo 'make mutants  changes of one line that tests must notice: minutes     (ARGS="--only powersgd")'
	@echo 'make gpu      all that needs a GPU, with what is installed      (PART=kernels, OUT=folder)'
	@echo "make conformance  torch's own tests of DistributedDataParallel, on torch's class and ours"
	@echo 'make asan     the native code and its tests under AddressSanitizer and UBSan (GCC)'
	@echo 'make sanitize the CUDA kernels on a GPU under compute-sanitizer: memcheck, then racecheck'
	@echo 'make lint     ruff: rules and format'
	@echo 'make format   ruff: repair both'
	@echo 'make words    the rules of plain English, for pages and messages'
	@echo 'make types    mypy, on the package as it is installed'
	@echo 'make files    each file with the first line that it says of itself     (| grep -i checkpoint)'
	@echo 'make clean    remove $(VENV) and what tools leave behind'
	@echo 'The first one makes $(VENV) with $(PYTHON); VENV=... and PYTHON=... choose others.'

# --no-compile: of 270 MB of Python a minute of compiling; most is never imported, and the first import does it.
$(STAMP): pyproject.toml setup.py
	@echo 'installing gradwire and its tools into $(VENV): a few minutes where torch is downloaded'
	@test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	@"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@touch $@

compare: $(STAMP)
	@"$(BIN)/gradwire" compare --link 100mbit,none $(ARGS)

# -W: what a reader would stumble over, such as a link to nowhere, is an error.
docs: $(STAMP)
	@"$(BIN)/python" -c 'import furo, myst_parser' 2> /dev/null || "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@"$(BIN)/python" -m sphinx -W --keep-going -q -j auto -d build/doctrees docs "$(SITE)"
	@echo 'open $(SITE)/index.html'

wheel: $(STAMP)
	@PYTHON="$(BIN)/python" .ci/wheel

test: $(STAMP)
	@$(PYTEST) $(BESIDE) --part quick $(ARGS)

test-all: $(STAMP)
	@$(PYTEST) $(BESIDE) -m '' $(ARGS)

test-rest: $(STAMP)
	@$(PYTEST) $(BESIDE) -m '' --part rest $(ARGS)

# Compiles all that the tests import, once: else each worker would compile torch and the tests at its first start.
compiled: $(STAMP)
	@$(PYTEST) --collect-only --quiet -m '' > "$(VENV)/collected" || { tail "$(VENV)/collected" >&2; false; }

fuzz: $(STAMP)
	@"$(BIN)/python" -m tests.trials --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants --workers $(or $(filter-out 0,$(WORKERS)),1) $(ARGS)

# Installs nothing: it runs with what there is, in $(VENV) or beside it.
gpu:
	@python="$(BIN)/python"; test -x "$$python" || python="$(PYTHON)"; "$$python" -m tests.gpu --out "$(OUT)" $(PART)

conformance: $(STAMP)
	@"$(BIN)/python" -m pytest tests/conformance -m '' $(ARGS)

# Python is not sanitized itself, so the libraries come first; its own leaks are not ours.
asan: $(STAMP)
	@rm -rf build "$(SANITIZED)"
	@CFLAGS='$(SANITIZE)' CXXFLAGS='$(SANITIZE)' LDFLAGS='$(SANITIZE)' "$(BIN)/python" -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --target "$(SANITIZED)" .
	@rm -rf build
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 GRADWIRE_KERNELS=native,reference \
		"$(BIN)/pytest" --override-ini 'pythonpath="$(SANITIZED)"' --import-mode=append tests/kernels tests/ddp_core/transport/test_shared_buffer.py $(ARGS)

# Without torch's cache of memory each tensor has bounds of its own; what needs the cache is left out.
sanitize: $(STAMP)
	@command -v compute-sanitizer > /dev/null || { echo 'compute-sanitizer is not on the PATH; it comes with the CUDA toolkit' >&2; exit 1; }
	@"$(BIN)/python" -c 'from gradwire import kernels; raise SystemExit(next(b.reason for b in kernels.backends() if b.name == "cuda") or 0)'
	@for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			"$(BIN)/python" -m pytest tests/gpu/test_cuda_kernels.py --override-ini timeout=0 -k 'not graph and not waits and not beyond' $(ARGS) || exit 1; \
	done

lint: $(STAMP)
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .

format: $(STAMP)
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

words: $(STAMP)
	@"$(BIN)/python" .ci/words.py

# A package of links: mypy does not follow the mapping of folders to packages. Nothing is written in the tree but its cache.
types: $(STAMP)
	@rm -rf "$(INSTALLED)" && mkdir -p "$(INSTALLED)/gradwire"
	@ln -s "$(CURDIR)"/gradwire/* $(foreach layer,kernels compress ddp_core hooks experiments,"$(CURDIR)/$(layer)") "$(INSTALLED)/gradwire"
	@cd "$(INSTALLED)" && "$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" --package gradwire

files:
	@git ls-files '*.py' '*.hpp' '*.cpp' '*.cu' | xargs awk 'FNR == 1 { gsub(/^("""|\/\/ )|"""$$/, ""); print FILENAME ": " $$0 }'

clean:
	rm -rf "$(VENV)" build dist "$(SITE)" *.egg-info .mypy_cache .pytest_cache .ruff_cache
