# Everything a developer or a CI run needs; each target sets itself up.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# FlashInfer and fla without the gigabytes that they ask for: only what importing them takes, in a
# place where nothing but their tests finds them.
KERNELS := $(VENV)/kernel-packages
KERNEL_PACKAGES := flashinfer-python fla-core apache-tvm-ffi nvidia-ml-py tabulate einops
MODEL ?= demo/checkpoint
FAULTS ?= 200
TEST_PROCESSES ?= $(shell expr $$(nproc) + 1)
LONG_TESTS := tests/sim tests/worker tests/e2e tests/faults tests/families
OTHER_TESTS := $(filter-out $(LONG_TESTS) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
# Tests and benchmarks start many processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check sim faults bench run-prefill run-decode clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything, native part included

# `pip install .` in this environment leaves a copy of our packages there; then all is made anew.
ifeq ($(shell grep -ls '"editable": *true' $(VENV)/lib/python3*/site-packages/baton-*.dist-info/direct_url.json 2>/dev/null),)
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt $(wildcard $(addsuffix /*,common/transport/native common/transport/native/stream common/engine/native))
	@command -v c++ >/dev/null || { echo "a C++ compiler is needed (Debian: apt-get install g++)"; exit 1; }
	@echo '#include <openssl/ssl.h>' | c++ -E -x c++ - >/dev/null 2>&1 || { echo "OpenSSL 3 is needed (Debian: apt-get install libssl-dev)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is needed (Debian: apt-get install python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null \
		|| { echo "Python's headers are needed (Debian: apt-get install python3-dev)"; exit 1; }
	@echo "making $(VENV) (a few minutes the first time)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --progress-bar off -qq -c constraints.txt torch
	@$(PY) -m pip install --progress-bar off -qq -c constraints.txt nanobind scikit-build-core cmake ninja libucx-cu12
	@echo "building the native part"
	@$(PY) -m pip install --progress-bar off -qq -c constraints.txt --no-build-isolation -e '.[dev,bench]'
	@rm -rf $(KERNELS)
	@$(PY) -m pip install --progress-bar off -qq -c constraints.txt --no-deps --target $(KERNELS) $(KERNEL_PACKAGES)
	@touch $@

demo: $(STAMP) ## start a pair, ask it 32 questions, show where the time went
	@$(PY) -m demo $(ARGS)

# One thread for each test process. What starts servers waits now and then, so that there is one
# process more than cores, and comes first: the short rest keeps all of them busy to the end.
# tests/test_tidy.py is part of `make check`.
test: $(STAMP) ## all tests that run on any machine (about 14 minutes on 2 quiet cores)
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(LONG_TESTS) $(OTHER_TESTS) -m "not soak and not gpu" \
		--numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

check: $(STAMP) ## ruff, mypy and the rules of the house
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) -m pytest -q tests/test_tidy.py

sim: $(STAMP) ## many thousand generated layouts and simulated schedules
	@$(PY) -m tests.planner.sweep --examples 20000
	@$(PY) -m tests.sim --mutations
	@$(PY) -m tests.sim --fleet
	@$(PY) -m tests.sim --seeds 5000

faults: $(STAMP) ## real processes, killed, frozen and restarted under load
	@$(PY) -m tests.transport.sanitized
	@$(PY) -m tests.faults --faults $(FAULTS)

bench: $(STAMP) ## measure everything beside its target; writes bench/out/report.html and .json
	@$(PY) -m bench

run-prefill: $(STAMP) ## a prefill server in the foreground (MODEL=DIR ARGS=...)
	@$(PY) -m prefill_server --model-path $(MODEL) --host 127.0.0.1 --port 30000 --bootstrap-port 8998 $(ARGS)

run-decode: $(STAMP) ## a decode server in the foreground that uses it
	@$(PY) -m decode_server --model-path $(MODEL) --port 30001 --prefill 127.0.0.1:8998 $(ARGS)

clean: ## remove what the other targets made
	@rm -rf $(VENV) build bench/out .mypy_cache .ruff_cache .pytest_cache .hypothesis
