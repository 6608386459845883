#!/usr/bin/env bash
# All linters, or with --fix the formatters. Takes the tools from the `lint` extra of the Python in
# $PYTHON (default python3).
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$("${PYTHON:-python3}" -c 'import os, sys; print(os.path.dirname(sys.executable))')
python_files=(directkv_jax models tests benchmarks examples scripts)
mapfile -t cpp_files < <(
  find csrc ffi tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' | sort
)

if [[ ${1:-} == --fix ]]; then
  "$bin/ruff" check --quiet --fix "${python_files[@]}"
  "$bin/ruff" format "${python_files[@]}"
  "$bin/clang-format" -i "${cpp_files[@]}"
  exit
fi

failed=0
check() {
  local name=$1
  shift
  if "$@"; then echo "lint: $name ok"; else failed=$((failed + 1)) && echo "lint: $name FAILED"; fi
}
check "ruff check" "$bin/ruff" check --quiet "${python_files[@]}"
check "ruff format" "$bin/ruff" format --quiet --check "${python_files[@]}"
check "mypy" "$bin/mypy"
check "clang-format" "$bin/clang-format" --dry-run -Werror "${cpp_files[@]}"
check "tracked files" "$bin/python" scripts/check_tracked_files.py
exit $((failed > 0))
