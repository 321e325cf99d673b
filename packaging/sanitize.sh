#!/usr/bin/env bash
# sanitize.sh: the core's tests under AddressSanitizer and UndefinedBehaviorSanitizer, and under
# ThreadSanitizer, both at once. sanitize.sh PYTHON: the extension as Python uses it, under the first two.
set -euo pipefail
cd "$(dirname "$0")/.."

build() {  # sanitizers, target, more options
  cmake -S . -B "build/sanitize-$1" -DCMAKE_BUILD_TYPE=Release -DSPARSESTEP_CORE_TESTS=ON \
    -DSPARSESTEP_WERROR=ON -DSPARSESTEP_SANITIZE="$1" "${@:3}" > /dev/null
  cmake --build "build/sanitize-$1" --target "$2" --parallel 2
}

test_core() {
  build "$1" test_core && "build/sanitize-$1/test_core"
}

mkdir -p build
if [ $# = 0 ]; then
  test_core thread > build/sanitize-thread.log 2>&1 &
  thread=$!
  test_core address,undefined
  wait $thread || { cat build/sanitize-thread.log; exit 1; }
  tail -1 build/sanitize-thread.log
  exit
fi

# The package with a sanitized core, in a folder of its own; without the site module, whose .pth files
# would lead to the installed one. Torch is not sanitized and leaks. The sanitizer has to find the
# functions that it replaces, so C++'s library is preloaded, too.
python=$(readlink -e "$(dirname "$1")")/$(basename "$1")
build address,undefined _C -DSPARSESTEP_MODULE=ON -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)"
site=build/sanitize-address,undefined/site
rm -rf $site && mkdir -p $site && cp -r src/sparsestep $site/ && rm -f $site/sparsestep/_C*.so
cp build/sanitize-address,undefined/_C*.so $site/sparsestep/
PYTHONPATH=$site:$("$python" -c 'import torch; print(torch.__path__[0][:-6])')
LD_PRELOAD="$(${CXX:-c++} -print-file-name=libasan.so) $(${CXX:-c++} -print-file-name=libstdc++.so)"
sanitized=(env PYTHONPATH="$PYTHONPATH" LD_PRELOAD="$LD_PRELOAD" PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0
  UBSAN_OPTIONS=print_stacktrace=1 "$python" -S)
"${sanitized[@]}" -m tests.fuzz --cases 600 --first 0 --timeout 120
"${sanitized[@]}" -m pytest tests/properties/test_step.py tests/properties/test_refusals.py
