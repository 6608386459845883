#!/usr/bin/env bash
# On a machine with a CUDA GPU: builds, runs the C++ tests plainly and under compute-sanitizer, runs
# the Python tests of the CUDA implementation, and writes <date>-<gpu>-check.json.
#
#   scripts/gpu_check.sh [--output DIR] [STAGE...]     stages: see scripts/gpu_check.py --help
#
# Needs jax with its CUDA plugin, nvcc >= 12.8, CMake, scikit-build-core, pybind11, pytest and
# hypothesis in the Python that $PYTHON names (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
