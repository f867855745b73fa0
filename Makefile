# The few verbs a newcomer needs. `make build-engine` does everything, from nothing.
MODEL ?= default
OUT ?= engines
BACKEND ?= inductor,onnxruntime,tensorrt-rtx
DTYPE ?= auto
DEVICE ?= cpu
MAX_BATCH ?= 8
MAX_LEN ?= 1024
QUANT ?=
PROMPT ?= What is the capital of France?
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
RUN := $(BIN)/seekforge
empty :=
comma := ,
space := $(empty) $(empty)
RUNNABLE := $(filter-out tensorrt tensorrt-rtx,$(subst $(comma),$(space),$(BACKEND)))

.PHONY: install build-engine compare generate inspect bench test test-gpu test-slow lint typecheck clean

install: $(VENV)/.installed

# setuptools is named because the editable install is made without an isolated build environment:
# that one would ignore the constraints and might fetch another torch.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt setuptools wheel torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

build-engine: install
	$(RUN) build '$(MODEL)' --out '$(OUT)' --backend '$(BACKEND)' --dtype '$(DTYPE)' \
	    --device '$(DEVICE)' --max-batch '$(MAX_BATCH)' --max-len '$(MAX_LEN)' \
	    $(if $(QUANT),--quant '$(QUANT)')
ifneq ($(RUNNABLE),)
	$(RUN) compare '$(OUT)'
	$(RUN) generate '$(OUT)' '$(PROMPT)' --chat --max-tokens 64
endif

compare: install
	$(RUN) compare '$(OUT)'

generate: install
	$(RUN) generate '$(OUT)' '$(PROMPT)' --chat

inspect: install
	$(RUN) inspect '$(OUT)'

bench: install
	$(RUN) bench '$(OUT)'

test: install
	$(BIN)/pytest -m 'not gpu and not slow'

test-slow: install
	$(BIN)/pytest -m 'slow and not gpu'

test-gpu: install
	$(BIN)/pytest -m gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) '$(OUT)' build *.egg-info .pytest_cache .mypy_cache .ruff_cache
