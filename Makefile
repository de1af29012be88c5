SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where the engine's environment and other downloads lie: outside the checkout, so that a fresh clone finds them again.
export KVPOOL_CACHE_DIR ?= $(or $(HOME),/root)/.cache/kvpool
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE := $(shell find pool/native -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cmake' -o -name CMakeLists.txt \) 2>/dev/null)
NATIVE_UNITS = $(filter-out pool/native/sim/%,$(filter %.cpp,$(NATIVE)))
NATIVE_TEXT = $(filter %.cpp %.h,$(NATIVE)) $(wildcard tests/fuzz/*.cpp tests/sanitize/*.cpp tests/sanitize/*.h)
QUICK := tests/unit tests/api tests/operator tests/property tests/format tests/chart tests/damage tests/crash tests/bench
# Suites that do not exist yet are left out, not an error.
existing = $(wildcard $(1))
TIDY_DIR := build/tidy

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environment -----------------------------------------------------------------------------------------------------------------

.PHONY: setup dev system hooks
setup: $(VENV)/.installed ## install what is missing: system packages (as root), .venv, the native part
dev: setup hooks ## setup, and the pre-commit hooks

system:
	@PYTHON=$(PYTHON) .ci/system

$(BIN)/python: | system
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("kvpool needs Python 3.10 or newer, $(PYTHON) is %d.%d; choose another: make PYTHON=python3.12 setup" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# Editable and without isolation: Python changes need nothing, a C++ change recompiles its own file only.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(NATIVE) | $(BIN)/python
	@$(BIN)/pip install -q 'scikit-build-core>=0.11' 'nanobind>=2.2'
	@echo "building the native part"
	@$(BIN)/pip install -q --no-build-isolation --editable '.[dev]'
	@touch $@

hooks: $(VENV)/.installed
	@$(BIN)/pre-commit install

# --- everyday --------------------------------------------------------------------------------------------------------------------

.PHONY: fmt generate check check-python check-native check-tests check-chart test test-slow test-crash test-damage test-fuzz test-sanitize test-sim test-kube test-engine engine-env demo bench bench-api test-api clean distclean
fmt: $(VENV)/.installed ## format Python and C++
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .
	@clang-format -i $(NATIVE_TEXT)

generate: $(VENV)/.installed ## write what follows from crds/ and from the chart's values: copies, tables
	@$(BIN)/python charts/generate.py

check: check-python check-native check-tests check-chart ## ruff, mypy, clang-format, clang-tidy, warnings, layers, _native.pyi, CRDs and chart

check-python: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check-native: $(VENV)/.installed
	@clang-format --dry-run -Werror $(NATIVE_TEXT)
	@cmake -S . -B $(TIDY_DIR) -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DKVPOOL_WERROR=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >/dev/null
	@cmake --build $(TIDY_DIR) --target kvpool_core -- --quiet
	@printf '%s\n' $(NATIVE_UNITS) | xargs -P $$(nproc) -n 1 clang-tidy --quiet -p $(TIDY_DIR) 2>&1 | sed -E '/^[0-9]+ warnings? generated/d'

check-tests: $(VENV)/.installed
	@$(BIN)/pytest -q tests/unit/test_layers.py tests/unit/test_native_stub.py

check-chart: $(VENV)/.installed
	@$(BIN)/python charts/generate.py --check
	@$(BIN)/pytest -q tests/chart/test_crds.py

test: $(VENV)/.installed ## the quick suites: no root, network, cluster, engine or GPU
	@$(BIN)/pytest -m 'not engine and not slow and not gpu and not kube' $(call existing,$(QUICK))

test-slow: $(VENV)/.installed ## the long form of the quick suites
	@$(BIN)/pytest --timeout=1800 -m 'slow and not engine and not gpu' $(call existing,$(QUICK))

# With fewer kills the run fails, also when every test passes.
test-crash: export KVPOOL_KILLS_MIN ?= 1000
test-crash: $(VENV)/.installed ## processes killed and stopped at any step; KVPOOL_SOAK_SECONDS=600 for longer
	@$(BIN)/pytest --timeout=7200 -m 'not engine and not gpu' tests/crash

# Every bit of a small region, random damage to larger ones, files swapped and truncated under their users. Ends with a summary of counts.
test-damage: export KVPOOL_EVERY_BIT := 1
test-damage: export KVPOOL_DAMAGE_AT_LEAST := 100000
test-damage: export KVPOOL_DAMAGE_ROUNDS ?= 1000
test-damage: export KVPOOL_DAMAGE_SECONDS ?= 3
test-damage: $(VENV)/.installed ## damaged media: every bit flipped, and worse; KVPOOL_DAMAGE_ROUNDS=20000 for longer
	@$(BIN)/pytest -q --timeout=7200 tests/damage

# Opening a region under clang's sanitizers, then all parsers with generated documents.
test-fuzz: export KVPOOL_FUZZ_EXAMPLES ?= 100
test-fuzz: $(VENV)/.installed ## fuzzers of the region format and of everything that is parsed; KVPOOL_FUZZ_SECONDS=600 for longer
	@.ci/system --fuzz
	@tests/fuzz/run
	@$(BIN)/pytest -q --timeout=7200 tests/property/test_parsers.py

# Three builds, kept in build/sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, with ThreadSanitizer, and one for valgrind.
test-sanitize: $(VENV)/.installed ## the native part under sanitizers and valgrind; KVPOOL_SANITIZE_SECONDS=300 for longer, _SHORT=1 for shorter
	@.ci/system --sanitize
	@$(BIN)/pytest -q --timeout=7200 tests/sanitize

test-sim: $(VENV)/.installed ## the protocol on a simulated non-coherent medium; KVPOOL_SIM_SEEDS=20000 for longer
	@$(BIN)/pytest --timeout=7200 tests/sim

# A bare etcd and kube-apiserver on loopback; the programs come from e2e/cluster. Without them every test is skipped, with the reason.
test-kube: $(VENV)/.installed ## against a real Kubernetes API: schemas, rules, access rights, server-side apply
	@$(BIN)/pytest --timeout=600 tests/kube

test-engine: engine-env ## real vLLM engines over one pool
	@$(BIN)/pytest --timeout=900 -m 'engine and not gpu' tests/engine

# The engine's environment is made once and kept in $(KVPOOL_CACHE_DIR); this checkout's kvpool is installed anew when it changed.
engine-env: $(VENV)/.installed
	@cd demo && ../$(BIN)/python -c 'import environment; environment.make_engine_environment(lambda text: print(text, flush=True))'

demo: $(VENV)/.installed ## two vLLM engines share one pool; SMALL=1 for the short form
	@$(BIN)/python demo/run.py

bench: $(VENV)/.installed ## load, store and lookup against memcpy of the same buffers
	@$(BIN)/python tests/bench/run.py

bench-api: $(VENV)/.installed ## the status API with 1,000 pools and 5,000 nodes, 200 requests a second, 500 event streams
	@$(BIN)/python tests/bench/status_api.py
	@$(BIN)/python tests/bench/status_cluster.py

# The long form of the generated requests; the short one is part of make test.
test-api: export KVPOOL_API_EXAMPLES ?= 200
test-api: $(VENV)/.installed ## the status API: generated requests, Redis, the dashboard in Chromium
	@.ci/system --api
	@$(BIN)/pip install -q 'playwright>=1.40' 'axe-playwright-python>=0.1.4'
	@$(BIN)/pytest --timeout=1800 -m 'not engine and not gpu' tests/api

# --- portability -----------------------------------------------------------------------------------------------------------------

.PHONY: wheels-check check-aarch64
wheels-check: $(VENV)/.installed ## build, install and test under each Python from 3.10 to 3.13 found here
	@.ci/wheels

check-aarch64: ## compile the native part for aarch64 (objects only)
	@.ci/system --aarch64
	@.ci/aarch64

# --- a real cluster ---------------------------------------------------------------------------------------------------------------

.PHONY: cluster-up cluster-down image e2e
CLUSTER := PYTHONPATH=e2e $(BIN)/python -m cluster

# As root on a machine with cgroup v1; the first time builds Kubernetes from its Go modules, about 20 minutes.
cluster-up: $(VENV)/.installed ## Kubernetes with two nodes on this machine; KVPOOL_CLUSTER names it, KVPOOL_CLUSTER_NODES=3
	@.ci/system --cluster
	@$(CLUSTER) up

cluster-down: $(VENV)/.installed ## end it; nothing is left
	@$(CLUSTER) down

image: $(VENV)/.installed ## the container image, as an oci-archive in the cache
	@.ci/system --image
	@$(CLUSTER) image

e2e: $(VENV)/.installed ## chart, operator, daemons and engines on a real cluster; KUBECONFIG=... takes one that is there
	@e2e/run

# The kernel's package is downloaded once and unpacked into the cache, as are this machine's tools and Python for the guests.
.PHONY: e2e-cxl
e2e-cxl: $(VENV)/.installed ## two guests in QEMU share an emulated CXL memory: composed, used, killed, rebooted, grown, damaged
	@.ci/system --guest
	@$(BIN)/pytest -o pythonpath=e2e -m guest --timeout=300 --durations=6 e2e/guest

clean: ## remove what was built
	rm -rf build dist demo.json e2e-cxl.json
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## and the environment
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
