# Two commands do all the set-up: `make quickstart` and `make test`. Both make .venv with the first python3 on PATH;
# another one is chosen with `make PYTHON=python3.12 ...`.
PYTHON ?= python3
VENV := .venv
VENV_NEWEST := .venv-newest
MODEL := .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PYTEST_ARGS ?=

# An install is done once for each content of pyproject.toml and place of this folder (an editable install knows its
# place): the stamp's name holds a checksum of both, so the next `make` starts at once.
KEY := $(shell (pwd; cat pyproject.toml) | cksum | cut -d ' ' -f 1)
# Touched when a venv is whole: an interrupted one is made again.
MADE := $(VENV)/.fastjax-made
MADE_NEWEST := $(VENV_NEWEST)/.fastjax-made
RUN_STAMP := $(VENV)/.fastjax-run-$(KEY)
TEST_STAMP := $(VENV)/.fastjax-test-$(KEY)
NEWEST_STAMP := $(VENV_NEWEST)/.fastjax-test-$(KEY)
PIP := -m pip --disable-pip-version-check install --quiet
# Tests never look for a GPU; `pytest -m gpu` on a machine that has one is run by hand.
# jax's CUDA plugin compiles kernels for GPUs that are not here (tests/aot). It lies beside the venv's packages, since a jax
# process that finds it and no GPU complains unless JAX_PLATFORMS is set.
AOT = $(VENV)/aot
AOT_STAMP := $(VENV)/.fastjax-aot-$(KEY)
TEST_ENV = JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$(AOT)

.PHONY: help quickstart model venv lint test test-all test-newest clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   make .venv, fetch SmolLM2-135M-Instruct and fine-tune it"
	@echo "make test         lint, then the tests"
	@echo "make test-all     lint, then every test, the long ones and those of the real model too"
	@echo "make test-newest  the tests with the newest jax on Python 3.12 or later, in $(VENV_NEWEST)"
	@echo "make lint         ruff and mypy"
	@echo "make model        fetch the quickstart's model only"
	@echo "make venv         make .venv with fastjax and what its tests need"
	@echo "make clean        remove both virtual environments and the caches; keep models and runs"

quickstart: $(RUN_STAMP) model
	$(VENV)/bin/python -m fastjax.train --config examples/quickstart/config.yaml --overwrite_output_dir

model: $(MODEL)
$(MODEL): | $(MADE)
	$(VENV)/bin/python examples/quickstart/fetch_model.py $@

venv: $(TEST_STAMP)

lint: $(TEST_STAMP)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check --quiet .
	$(VENV)/bin/python -m mypy

test: lint model $(AOT_STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n 2 -m "not gpu and not network and not slow" $(PYTEST_ARGS)

test-all: lint model $(AOT_STAMP)
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n 2 -m "not gpu and not network" $(PYTEST_ARGS)

test-newest: $(NEWEST_STAMP)
	$(TEST_ENV) $(VENV_NEWEST)/bin/python -m pytest -n 2 -m "not gpu and not network and not slow" $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(VENV_NEWEST) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(MADE):
	@sh tools/make_venv.sh $(VENV) 3.11 $(PYTHON)
	@touch $@

$(MADE_NEWEST):
	@sh tools/make_venv.sh $(VENV_NEWEST) 3.12 python3.13 python3.12 python3.14 $(PYTHON)
	@touch $@

$(RUN_STAMP): | $(MADE)
	@echo "Installing fastjax into $(VENV): some minutes the first time."
	$(VENV)/bin/python $(PIP) -e .
	@touch $@

# The tests' install holds the run's, so that `make quickstart` after `make test` installs nothing.
$(TEST_STAMP): | $(MADE)
	@echo "Installing fastjax and what its tests need into $(VENV): some minutes the first time."
	$(VENV)/bin/python $(PIP) -e '.[test,dev]'
	@touch $@ $(RUN_STAMP)

$(NEWEST_STAMP): | $(MADE_NEWEST)
	@echo "Installing fastjax with the newest jax, and what its tests need, into $(VENV_NEWEST)."
	$(VENV_NEWEST)/bin/python $(PIP) --upgrade -e '.[test,dev]'
	@touch $@

# 132 MB, of jax's own version. Their dependencies, NVIDIA's libraries, are for running, not for compiling.
$(AOT_STAMP): $(TEST_STAMP)
	$(VENV)/bin/python $(PIP) --no-deps --upgrade --target $(AOT) \
	  $$($(VENV)/bin/python -c "import jaxlib; v = jaxlib.__version__; print(f'jax-cuda13-plugin=={v} jax-cuda13-pjrt=={v}')")
	@touch $@
