# `make demo` and `make test` need nothing but Python and a package index. See README.md.
#
# On a machine with a GPU the environment is laid over the system's packages: an SGLang and a Mooncake that are there
# already are used as they are, and what is missing is installed with its own dependencies. Choose Mooncake's flavour
# with MOONCAKE=mooncake (CUDA 12), mooncake-cuda13 or mooncake-non-cuda. Without a GPU the pinned CPU environment of
# requirements/ is installed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(or $(shell command -v python3.11),python3)
MOONCAKE ?= mooncake
PYTEST_ARGS ?=
# Processes that share the tests: one for the real pair, which keeps about a core busy, the others for the rest.
# 0: no process but pytest's own, as `pytest` by hand.
TEST_WORKERS ?= 2
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(sort $(wildcard requirements/*.txt))
# The stamps carry a digest of what they were made from, so that a change of a pin installs again and a clone's new
# file times do not.
PACKAGES_STAMP := $(VENV)/.packages-$(shell cat $(REQUIREMENTS) | sha256sum | cut -c1-16)$(if $(GPU),-gpu-$(MOONCAKE))
PROJECT_STAMP := $(VENV)/.project-$(shell sha256sum < pyproject.toml | cut -c1-16)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Shared libraries that Mooncake loads.
DEBIAN_PACKAGES := libibverbs1 libnuma1 librdmacm1
LIBRARIES := libibverbs.so.1 libnuma.so.1 librdmacm.so.1
# Programs that tests run: a browser for reports, promtool for alert rules. Debian's packages chromium and prometheus.
TEST_PROGRAMS := chromium promtool

# One thread a process: the servers share few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup libraries model demo test test-programs test-versions lint clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: libraries $(PACKAGES_STAMP) $(PROJECT_STAMP) ## Make the virtual environment .venv and install everything

libraries:
	@missing=; \
	for library in $(LIBRARIES); do \
	    { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep -F "$$library" >/dev/null || missing="$$missing $$library"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "setup: installing$$missing from Debian's packages"; \
	    apt-get update -qq; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(DEBIAN_PACKAGES); \
	else \
	    echo "setup: Mooncake needs$$missing; install them, then run make again. On Debian or Ubuntu:" >&2; \
	    echo "    sudo apt-get install -y --no-install-recommends $(DEBIAN_PACKAGES)" >&2; \
	    exit 1; \
	fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; need = (3, 10) if "$(GPU)" else (3, 11); sys.exit(sys.version_info < need and \
	    "setup: Python %d.%d is too old, %d.%d or later is needed: make PYTHON=python3.11" % (*sys.version_info[:2], *need))'
	$(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)

$(PACKAGES_STAMP): $(BIN)/python
	@rm -f $(VENV)/.packages-*
ifeq ($(GPU),yes)
	@echo "setup: GPU found, using the packages of this machine where there are any"
	$(PIP) install -r requirements/dev.txt
	$(BIN)/python -c 'import sglang' 2>/dev/null || $(PIP) install -e '.[sglang]'
	$(BIN)/python -c 'import mooncake' 2>/dev/null || $(PIP) install -e '.[$(MOONCAKE)]'
	$(BIN)/python -c 'import sglang_router' 2>/dev/null || $(PIP) install sglang-router
	$(BIN)/python -c 'import gguf' 2>/dev/null || $(PIP) install gguf
else
	@echo "setup: no GPU, installing the pinned CPU environment (about 3 GB)"
	$(PIP) install -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP) install --no-deps -r requirements/cpu-no-deps.txt
endif
	@touch $@

$(PROJECT_STAMP): $(PACKAGES_STAMP)
	@rm -f $(VENV)/.project-*
	$(PIP) install --quiet $(if $(GPU),,--no-deps --no-build-isolation) -e .
ifneq ($(GPU),yes)
	@# SGLang does not import on a CPU without these stand-ins; see launch/cpu_shims/sitecustomize.py.
	@echo "$(CURDIR)/launch/cpu_shims" \
	    > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/spectrumkv_cpu_shims.pth"
endif
	@touch $@

model: setup ## Fetch and convert the small real model of the demo and the tests
	$(BIN)/python -m spectrumkv_sglang.launch.model

demo: setup ## Run a real prefill/decode pair and compare it with a plain server
	$(BIN)/python -m spectrumkv_sglang.launch.demo $(DEMO_ARGS)

test-programs: # Without the right to install, the tests that need them say so and skip; for root they fail.
	@for program in $(TEST_PROGRAMS); do \
	    command -v $$program >/dev/null && continue; \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "test: installing chromium and prometheus from Debian's packages"; \
	        apt-get update -qq; \
	        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium prometheus; \
	        break; \
	    fi; \
	    echo "test: $$program is missing: what needs it is NOT TESTED. sudo apt-get install chromium prometheus" >&2; \
	done

# Packages of other SGLang releases come as sources: without their byte code each of a server's processes compiles them.
test test-versions: export PYTHONDONTWRITEBYTECODE =
test: model test-programs ## Run the tests (all but those of `make test-versions` that repeat others)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

test-versions: model ## Run the real pair on each supported SGLang release
	$(BIN)/python -m pytest tests/pair -m versions $(PYTEST_ARGS)

# mypy follows no editable install: it gets the package laid out with links, as an ordinary install would be.
TYPED := build/typed
lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/spectrumkv_sglang
	@ln -s $(addprefix $(CURDIR)/,$(wildcard spectrumkv_sglang/*)) $(TYPED)/spectrumkv_sglang/
	@ln -s $(CURDIR)/kernels $(CURDIR)/launch $(TYPED)/spectrumkv_sglang/
	MYPYPATH=$(TYPED) $(BIN)/mypy -p spectrumkv_sglang

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
