#!/usr/bin/env bash
# The C++ tests of the CPU kernels: `cpp_tests.sh native`, or `cpp_tests.sh aarch64` with Debian's
# cross compiler under qemu-user. Exit status 77: the tools are not here.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?native or aarch64}
build=build/cpp-$target
options=()
if [[ $target == aarch64 ]]; then
  for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed"; exit 77; }
  done
  options+=(-DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-toolchain.cmake")
fi
cmake -S tests/cpp -B "$build" -DCMAKE_BUILD_TYPE=Release "${options[@]}"
cmake --build "$build" --parallel 2
ctest --test-dir "$build" --output-on-failure
