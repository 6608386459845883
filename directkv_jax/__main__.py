"""`python -m directkv_jax` is the command `directkv`."""

from directkv_jax.cli import run_as_program

if __name__ == "__main__":
    run_as_program()
