# make demo       the whole way on a tiny model: SFT, GRPO, evaluation (SEED=0, 1, ... chooses the seed)
#                 ROLLOUT=sglang: replies come from an SGLang server, on a CPU too;  TP=2: tensor-parallel training
# make test       the tests;  make test-all  with whole sweeps
# make gpu-check  one CUDA GPU against the CPU (PYTHON names an environment whose torch sees the GPU)
# make lint       ruff, mypy, import-linter
# make venv       only the environments: .venv (training) and .venv-sglang (servers that write replies)
# make clean      removes them and everything that was made
# PYTHON=python3.12 chooses the interpreter (3.11 or 3.12) that they are made from.

PYTHON ?= python3
SEED ?= 0
ROLLOUT ?= local
TP ?= 1
PYTEST ?=

VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED ?= 0

# A stamp's name holds a hash of everything its environment depends on: another hash, another install.
# It is made last, so an interrupted install is never taken for a finished one.
KEY := $(shell { cat requirements/cpu.txt requirements/dev.txt pyproject.toml setup.py; $(PYTHON) --version; } 2>&1 | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(KEY)
SGLANG_KEY := $(shell { cat requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt; $(PYTHON) --version; } 2>&1 | sha256sum | cut -c1-16)
SGLANG_READY := $(SGLANG)/.ready-$(SGLANG_KEY)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint gpu-check clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

venv: $(READY) $(SGLANG_READY)

define check_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1); rlmca needs Python 3.11 or 3.12." >&2; \
	  echo "make: name one, for example: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
endef

$(READY):
	$(check_python)
	@echo "making $(VENV) with $$($(PYTHON) --version) (a minute or two; only when the requirements change)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# SGLang pins a torch and a transformers of its own, so its servers have an environment of their own.
$(SGLANG_READY):
	$(check_python)
	@echo "making $(SGLANG) with $$($(PYTHON) --version) (a minute or two; only when its requirements change)"
	rm -rf $(SGLANG)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet -r requirements/sglang-cpu.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r requirements/sglang-cpu-nodeps.txt
	@touch $@

demo: $(READY) $(if $(filter sglang,$(ROLLOUT)),$(SGLANG_READY))
	$(BIN)/python -m rlmca.bench.demo --seed $(SEED) --rollout $(ROLLOUT) --tp $(TP)

# pytest says 5 when nothing was selected, which is fine in one of the two parts, not in both. Coverage is that of the
# first part: it slows the second, which starts processes, by a third.
test: $(READY) $(SGLANG_READY)
	@$(BIN)/coverage erase
	@$(BIN)/python -m pytest -n 2 -m "not serial" --cov --cov-report=term $(PYTEST); beside=$$?; \
	$(BIN)/python -m pytest -m serial $(PYTEST); alone=$$?; \
	[ $$beside = 0 ] || [ $$beside = 5 -a $$alone = 0 ] || exit 1; \
	[ $$alone = 0 ] || [ $$alone = 5 -a $$beside = 0 ] || exit 1

test-all:
	@$(MAKE) test PYTEST="--whole $(PYTEST)"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not in .venv: its torch is the CPU build.
gpu-check:
	$(PYTHON) tools/gpu_check.py

clean:
	rm -rf $(VENV) $(SGLANG) outputs build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .coverage .coverage.*
	find rlmca tests tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
