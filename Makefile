# On a fresh machine, start with `make demo` or `make test`. Each creates what it needs (.venv, torch at
# the version in constraints.txt, the native build) and is quick when run again.
#
# With TORCH=2.15.0, any target uses that release of torch, in a virtual environment of its own.

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.installed
LIMIT := build/bench/.built
PIP := $(BIN)/pip install --disable-pip-version-check -c $(VENV)/constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal
FORMATTED := $(wildcard native/*/*.cpp native/*/*.h benchmarks/native/*)
NATIVE := $(filter-out native/tests/% benchmarks/%,$(FORMATTED))

.PHONY: help demo test messages lint format integrations fuzz faults mutants mutants-native coverage \
	sanitize portability gpu-check bench board house docs wheel release-requirements clean

help: ## this list
	@sed -n 's|^\([a-z-]*\)[a-z -]*:.*## |\1\t|p' Makefile | expand -t 22

demo: $(or $(wildcard $(READY)),$(VENV)/.demo) ## train word vectors with torch's SparseAdam and ours
	@echo "[3/3] demo"
	@$(BIN)/sparsestep demo

test: $(READY) $(LIMIT) ## the tests; ALL=1 with every instruction set and the slow ones
	$(if $(ALL),SPARSESTEP_TESTS=all) $(PYTEST)

messages: $(READY) ## accept what refusals say now, in tests/messages.txt
	$(BIN)/python -W ignore -m tests.messages

lint: $(READY) ## what CI checks: ruff, clang-format, mypy, pyright over the examples, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy
	$(if $(shell command -v node),PYTHONPATH=src $(BIN)/python -m pyright --pythonpath $(BIN)/python)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.mutants.run --check

format: $(READY) ## fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

integrations: $(VENV)/.extra-integrations ## examples for Lightning, Accelerate, Transformers, PyG, PyKEEN
	$(PYTEST) tests/test_integrations.py

fuzz: $(READY) ## random programs, until stopped; SECONDS=600 or CASES=20000 sets an end, FIRST=0 the first seed
	$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(CASES),--cases $(CASES)) \
		$(if $(FIRST),--first $(FIRST))

faults: $(READY) ## failed allocations, signals, kills; SECONDS=1800, SEED=1
	$(BIN)/python -W ignore -m tests.faults \
		$(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

mutants mutants-native: $(READY) ## seeded bugs that tests must notice; ONLY="p-crc-dropped", WORKERS=2
	$(BIN)/python -m tests.mutants.run $(if $(findstring native,$@),--native) $(if $(ONLY),--only $(ONLY)) \
		--workers $(or $(WORKERS),2)

coverage: $(VENV)/.extra-coverage ## lines and branches that tests reach, in build/coverage.json
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses auto || true
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/coverage report --skip-covered --sort=cover | tail -40

sanitize: $(if $(MODULE),$(READY)) ## the core's tests under the sanitizers; MODULE=1: the extension in Python
	packaging/sanitize.sh $(if $(MODULE),$(BIN)/python)

portability: ## the core with Clang, for Windows (MinGW) and 64-bit Arm (QEMU)
	packaging/portability.sh

gpu-check: $(VENV)/.extra-triton ## GPU kernels without a GPU: compiled ahead of time, and interpreted
	TRITON_CACHE_DIR=build/triton $(BIN)/python -W ignore -m tests.engines.triton_compile
	SPARSESTEP_TESTS=triton TRITON_INTERPRET=1 $(PYTEST) \
		tests/engines/test_triton.py tests/engines/test_triton_targets.py tests/engines/test_triton_waits.py \
		tests/grads/test_dedup.py tests/properties/test_layouts.py tests/grads/test_masks.py

bench: $(READY) $(LIMIT) ## benchmarks; ARGS="--suite lookups", see benchmarks/README.md
	$(BIN)/python -m benchmarks $(ARGS)

# The data goes into a folder of its own: these packages without what they need would break other targets.
board: $(VENV)/board ## examples on real data against published accuracies, in docs/gallery/board.md
	PYTHONPATH=$(VENV)/board $(BIN)/python -m benchmarks.board $(ARGS)

house: $(READY) ## figures about the code, with the command behind each
	$(BIN)/python packaging/house.py

docs: $(VENV)/.extra-docs $(VENV)/board ## the site, in docs/_build/html
	rm -rf docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html

wheel: ## sdist and wheel, tested in a clean environment; WHEEL_TESTS=tests for all tests
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	packaging/test_wheel.sh $(BIN) $(or $(WHEEL_TESTS),tests/optim tests/engines tests/test_errors.py)

release-requirements: ## update the pinned tools that build and publish releases
	packaging/lock.sh

clean: ## remove everything that was built
	rm -rf .venv .venv-torch-* build dist docs/_build

# Packages that only one target needs.
EXTRA_integrations := -r packaging/integrations.txt
EXTRA_coverage := "coverage>=7.10"
EXTRA_triton := --no-deps triton
EXTRA_docs := "sparsestep[docs]"
EXTRA_board := pykeen==1.11.1 recbole==1.2.1 gensim==4.4.0
$(VENV)/.extra-%: $(READY) packaging/integrations.txt
	$(PIP) --quiet $(EXTRA_$*)
	touch $@

$(VENV)/board: $(READY)
	$(PIP) --no-deps --target $@ --upgrade $(EXTRA_board)
	touch $@

# The limit of the benchmarks is no part of the package.
$(LIMIT): $(READY) $(wildcard benchmarks/native/*)
	cmake -S . -B build/bench -DSPARSESTEP_BENCH=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	cmake --build build/bench --target _limit --parallel
	touch $@

# Builds with the tools in this environment: pip's own would be new each time, and compile everything
# again instead of what has changed. Sources of Python are used in place.
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind>=2.2" \
	$(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
PHASE := $(PYTHON) packaging/phase.py
define INSTALL  # extras, options of CMake, a variable for the environment
	@test -x $(BIN)/python || $(PHASE) "[1/3] virtual environment" $(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(VENV)/constraints.txt
	@$(PHASE) "[1/3] torch and build tools" $(PIP) torch $(BUILD_TOOLS)
	@$(PHASE) "[2/3] $(if $(3),no C++ compiler found: pure Python,compiling)" \
		env $(3) $(PIP) -v --no-build-isolation --config-settings=build-dir=build/$(notdir $(VENV))/{wheel_tag} \
		$(addprefix --config-settings=cmake.define.SPARSESTEP_,$(2)) -e ".[$(1)]"
	@touch $@
endef
DEV := cli,dev
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) $(wildcard src/sparsestep/*/__init__.py)

$(READY): $(SOURCES)
	$(call INSTALL,$(DEV),WERROR=ON HOST_ONLY=OFF)

# The demo works without a compiler, too: on the reference engine.
PURE = $(if $(strip $(foreach name,$(CXX) c++ clang++,$(shell command -v $(name) 2>/dev/null))),,SPARSESTEP_PURE=1)
$(VENV)/.demo: $(SOURCES)
	$(call INSTALL,cli,WERROR=OFF HOST_ONLY=ON,$(PURE))
