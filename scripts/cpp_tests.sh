#!/usr/bin/env bash
# C++ tests that need no GPU. Exit status 77: the tools are not here.
#
#   cpp_tests.sh native    the CPU kernels
#   cpp_tests.sh aarch64   the CPU kernels by Debian's cross compiler, under qemu-user
#   cpp_tests.sh cuda      everything of CUDA compiled for one GPU by nvcc; its kernels emulated on
#                          the CPU, and the refusals of the host pool. Takes pybind11 and jaxlib
#                          from $PYTHON (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?native, aarch64 or cuda}
build=build/cpp-$target
source=tests/cpp
options=(-DCMAKE_BUILD_TYPE=Release)
make=()
select=()
case $target in
  native) ;;
  aarch64)
    for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
      command -v "$tool" >/dev/null || { echo "skipped: $tool is not installed"; exit 77; }
    done
    options+=(-DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-toolchain.cmake")
    ;;
  cuda)
    if ! command -v nvcc >/dev/null && [[ -z ${CUDA_HOME:-} && ! -x /usr/local/cuda/bin/nvcc ]]; then
      echo "skipped: nvcc is not installed"
      exit 77
    fi
    source=.
    python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
    options+=(
      -DDIRECTKV_CUDA=ON -DDIRECTKV_BUILD_TESTS=ON -DDIRECTKV_ALLOW_NEWER_FFI=ON
      "-DCMAKE_CUDA_ARCHITECTURES=90-real;90-virtual" -DPython_EXECUTABLE="$python"
      -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
    )
    make=(--target _native_cuda directkv_cuda_tests directkv_cuda_emulated_tests directkv_cuda_emulated_tests_sm80 directkv_host_pool_tests)
    select=(--tests-regex 'cuda|host_pool')
    ;;
  *) echo "unknown target $target" >&2 && exit 2 ;;
esac
cmake -S "$source" -B "$build" "${options[@]}"
cmake --build "$build" --parallel 2 "${make[@]}"
ctest --test-dir "$build" --output-on-failure "${select[@]}"
