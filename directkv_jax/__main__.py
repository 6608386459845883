"""`python -m directkv_jax` is the command `directkv`."""

import sys

from directkv_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
