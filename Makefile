# On a machine with python3 (3.11 or newer) and make, every target works from a fresh clone: what it needs is installed into
# $(VENV) first, from pinned and hashed lists.

VENV    ?= .venv
PYTHON  ?= python3
# One worker per core. More gains little, as the tests are bound by processor and fsync, and makes those with a clock unsteady.
WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=
FUZZ_SECONDS ?= 300

BIN := $(VENV)/bin
# Errors only: a mirror's complaints about its own places are noise to somebody who waits for a demo.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
UV  ?= $(BIN)/uv

# The first would hide a missing flush; without bytecode files the many processes of the tests would start five times slower.
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE
# Nothing from the caller's environment may stand in for what is installed.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help demo test check format soak bench fuzz lock clean venv

help:
	@echo "make demo    a real agent, killed again and again while it works (DEMO_ARGS=...)"
	@echo "make test    all tests, small numbers (PYTEST_ARGS=..., WORKERS=n)"
	@echo "make check   format, lint, strict types"
	@echo "make soak    the tests that scale, with the full numbers"
	@echo "make fuzz    forged bytes against all that reads stored ones (FUZZ_SECONDS=300, FUZZ_SEED=n)"
	@echo "make bench   measurements against other libraries (BENCH_ARGS=...)"
	@echo "make format  let ruff rewrite what 'make check' would complain about"
	@echo "make lock    new pins in requirements*.txt (LOCK_ARGS=--upgrade for newer releases)"
	@echo "make clean   remove $(VENV), caches and build products"

# --- environments -------------------------------------------------------------------------------------------------------------
# Three levels in one folder: what the demo needs, what development needs, what the measurements need. A higher level marks the
# lower ones as done, so that no target installs twice.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "safepoint needs Python 3.11 or newer; set PYTHON=...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: requirements.txt requirements-build.txt pyproject.toml | $(BIN)/python
	@echo "installing what the demo needs into $(VENV)"
	@$(PIP) install --require-hashes -r requirements.txt -r requirements-build.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.txt pyproject.toml | $(BIN)/python
	@echo "installing the tools for tests and checks into $(VENV)"
	@$(PIP) install --require-hashes -r requirements-dev.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $(VENV)/.base $@

$(VENV)/.bench: requirements-bench.txt | $(VENV)/.dev
	@echo "installing the libraries to measure against into $(VENV)"
	@$(PIP) install --require-hashes -r requirements-bench.txt
	@touch $@

venv: $(VENV)/.dev

# --- what people run ----------------------------------------------------------------------------------------------------------

demo: $(VENV)/.base
	@$(BIN)/python examples/demo/run.py $(DEMO_ARGS)

# tests/conftest.py leaves out what is marked "soak"; so a -m in PYTEST_ARGS does not bring it back.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Folders that appear only later in the life of the tree are checked from the day they exist.
SIDE := $(wildcard tests examples bench)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src
	$(BIN)/mypy --config-file .ci/mypy-side.ini $(SIDE)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Exit code 5 is pytest's "no test was collected", which is no failure while nothing scales yet.
soak: export SAFEPOINT_SOAK = 1
soak: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "scaled or soak" --timeout 1800 -o faulthandler_timeout=1830 \
		$(PYTEST_ARGS) || [ $$? -eq 5 ]

# FUZZ_SEED, which a failure prints, is read from the environment.
fuzz: $(VENV)/.dev
	$(BIN)/python -W error -m tests.support.fuzz $(FUZZ_SECONDS)

bench: $(VENV)/.bench
	$(BIN)/python bench/run.py $(BENCH_ARGS)

# --- upkeep -------------------------------------------------------------------------------------------------------------------
# One resolution for all supported Pythons. No index address and no path is written, so the lists work behind any mirror. The
# narrower lists come first and bind the wider ones: what is in two lists has one version.

COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate $(LOCK_ARGS)

lock:
	@command -v $(UV) >/dev/null || $(MAKE) venv
	$(COMPILE) pyproject.toml --output-file requirements.txt
	$(COMPILE) --group pyproject.toml:build -c requirements.txt --output-file requirements-build.txt
	$(COMPILE) pyproject.toml --extra testing --group dev -c requirements.txt -c requirements-build.txt --output-file requirements-dev.txt
	$(COMPILE) pyproject.toml --extra testing --group bench -c requirements-dev.txt --output-file requirements-bench.txt

clean:
	rm -rf $(VENV) dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
