# `make demo` and `make test` are all a new checkout needs: each sets up .venv first.
# Paths stay relative and tools run as `python -m`: both survive a folder name with a space.

PYTHON ?= python3
JOBS ?= 2
BENCH ?= aggregate compute overhead scale steps data rules report
ARGS ?=

VENV_PYTHON := .venv/bin/python
READY := .venv/.ready
PIP_INSTALL := $(VENV_PYTHON) -m pip --disable-pip-version-check install --no-warn-script-location

# Data sets that lie beside the checkout are used unless the caller names others.
ifeq ($(origin FEDGLAD_DATA),undefined)
NEIGHBOUR_DATA := $(shell cd ../shared/data 2>/dev/null && pwd)
ifneq ($(NEIGHBOUR_DATA),)
export FEDGLAD_DATA := $(NEIGHBOUR_DATA)
endif
endif

# Without this, every pyright run asks the network for newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help demo test test-slow lint format docs bench

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## FedAvg with and without FedGLAD on digits, also averaged, one bad round forced
	@echo "Ten runs of 60 rounds: one or two minutes on two cores, and 13 MB in out/demo."
	@$(VENV_PYTHON) examples/demo.py $(ARGS)

test: $(READY) ## Run the fast tests (ARGS="-k glad" to choose)
	@echo "Running the fast tests: 4 to 8 minutes on two cores, and some 50 MB for that time."
	@$(VENV_PYTHON) -m pytest -m "not slow" -n $(JOBS) $(ARGS)

test-slow: $(READY) ## Run the slow tests: real processes, a browser, kills
	@echo "Running the slow tests …"
	@$(VENV_PYTHON) -m pytest -m slow $(ARGS) || [ $$? -eq 5 ] # 5: nothing is marked slow

lint: $(READY) ## Check format, lint rules and types
	@echo "Checking format, lint rules and types …"
	@$(VENV_PYTHON) -m ruff format --check
	@$(VENV_PYTHON) -m ruff check
	@$(VENV_PYTHON) -m pyright

format: $(READY) ## Format the code and fix what ruff can fix
	@$(VENV_PYTHON) -m ruff check --fix --exit-zero --quiet
	@$(VENV_PYTHON) -m ruff format

docs: $(READY) ## Write docs/methods.md and docs/api.md from the docstrings
	@$(VENV_PYTHON) docs/make.py

bench: $(READY) ## Measure against the machine's limit (BENCH=compute to choose)
	@for name in $(BENCH); do \
		echo; echo "benchmarks/$$name.py"; \
		$(VENV_PYTHON) benchmarks/$$name.py $(ARGS) || exit 1; \
	done

# torch goes first and alone, so that its pin decides the build before anything else asks for it.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fedglad needs Python 3.11 or newer, but '$(PYTHON)' is" \
			"$$("$(PYTHON)" --version 2>/dev/null || echo missing)." \
			"Name another one: make $(or $(MAKECMDGOALS),help) PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "Setting up .venv: once, about 2 minutes and 3 GB of disk …"
	@"$(PYTHON)" -m venv .venv || { \
		echo "Could not create .venv; on Debian and Ubuntu install the package python3-venv." >&2; \
		exit 1; }
	@{ $(PIP_INSTALL) -c constraints.txt torch && \
		$(PIP_INSTALL) -c constraints.txt -e '.[dev]'; } >.venv/install.log 2>&1 || { \
		tail -n 20 .venv/install.log >&2; \
		echo "Installation failed; the whole log is in .venv/install.log" >&2; \
		exit 1; }
	@touch $(READY)
