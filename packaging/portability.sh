#!/usr/bin/env bash
# The core and its tests as other platforms compile them: with Clang, for Windows with MinGW, for 64-bit
# Arm with GCC. The first and the last also run, the last under QEMU. MinGW with POSIX threads, which older
# releases need for std::thread.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in clang++ x86_64-w64-mingw32-g++-posix aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $tool > /dev/null || {
    echo "make portability: missing $tool. On Debian or Ubuntu, run:" \
      "apt-get install clang g++-mingw-w64-x86-64 g++-aarch64-linux-gnu qemu-user" >&2
    exit 1
  }
done

build() {  # folder, compiler, more options
  cmake -S . -B "build/portability-$1" -DCMAKE_BUILD_TYPE=Release -DSPARSESTEP_CORE_TESTS=ON \
    -DSPARSESTEP_WERROR=ON -DSPARSESTEP_FEW_KERNELS=ON -DCMAKE_CXX_COMPILER="$2" "${@:3}"
  cmake --build "build/portability-$1" --target test_core --parallel 2
}

build clang clang++
build mingw x86_64-w64-mingw32-g++-posix -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64
build aarch64 aarch64-linux-gnu-g++ -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64
build/portability-clang/test_core
qemu-aarch64 -L /usr/aarch64-linux-gnu build/portability-aarch64/test_core
