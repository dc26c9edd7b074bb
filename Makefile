# Everything runs from one virtual environment that the first target needing it creates.
#   make PYTHON=python3.13 VENV=.venv-3.13 test     another interpreter, beside the first

PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin

# The pins hold for the build environment, too: old pip reads the first variable, new pip the second.
# A relative path, because pip splits these at spaces.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export GREL_REQUIRE := $(REQUIRE)
export REDIS KEEP EXTERNAL

.PHONY: help demo test check format docs bench test-pythons pins clean
.DEFAULT_GOAL := help

help: ## print these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r target text; do \
		printf '%-20s %s\n' "$$target" "$$text"; done

demo: $(VENV)/demo.stamp ## run the shop for half a minute (REDIS=1: on Valkey; KEEP=1: leave it running)
	$(bin)/python -m examples.demo

test: $(VENV)/dev.stamp ## run the tests (REQUIRE=all: a missing server fails instead of skipping; ARGS=...: for pytest)
	$(bin)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp ## format, lint, types, layers, spelling, dead code, sizes, sleeping tests
	$(bin)/ruff format --check
	$(bin)/ruff check
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/codespell
	$(bin)/vulture
	$(bin)/python tools/lint_sizes.py
	$(bin)/python tools/lint_tests.py

format: $(VENV)/dev.stamp ## rewrite the sources as `make check` wants them
	$(bin)/ruff format
	$(bin)/ruff check --fix

docs: $(VENV)/dev.stamp ## check every link and every code block of the documentation
	$(bin)/python -m pytest tests/docs $(ARGS)

bench: $(VENV)/dev.stamp ## run the benchmarks (ARGS=...)
	$(bin)/python -m benchmarks.run $(ARGS)

test-pythons: ## run the tests under every Python from 3.11 on that this machine has
	@set -e; $(PYTHON) tools/pythons.py | while read -r version path; do \
		echo "== Python $$version ($$path)"; \
		$(MAKE) --no-print-directory test PYTHON="$$path" VENV=".venv-$$version" </dev/null; done

pins: ## resolve everything anew and rewrite constraints.txt
	$(PYTHON) tools/pins.py

clean: ## remove the environments and everything generated
	rm -rf .venv .venv-* build dist .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `dev` contains `demo`: whoever has the tests' environment installs nothing for the demo.
$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@test $(VENV)/dev.stamp -nt pyproject.toml -a $(VENV)/dev.stamp -nt constraints.txt || { \
		echo "installing what the demo needs"; $(bin)/python -m pip install -qq -e '.[demo]'; }
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "installing what the tests need"
	@$(bin)/python -m pip install -qq -e '.[dev]'
	@touch $@

$(VENV)/python.stamp:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is `$(PYTHON) -V`, and 3.11 is the oldest that works: say which one to use, as in 'make PYTHON=python3.13 ...'." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot create environments here: install the package python3-venv ('apt install python3-venv' on Debian and Ubuntu)." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@
