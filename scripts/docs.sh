#!/usr/bin/env bash
# Builds the documentation site into build/site; a warning is an error. Takes the tools of the `docs`
# extra from the Python in $PYTHON (default python3). Nothing has to be compiled or installed.
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1 # the theme's, of its own end of life
exec "${PYTHON:-python3}" -m mkdocs build --strict "$@"
