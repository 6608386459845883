"""Compiles directkv_jax for an H200 on a machine without a GPU; checks that no cache is copied.

`programs` names what is compiled, `target` is the absent GPU, `hlo` says what is wrong with the
result. `scripts/compile_check.py` prints one line for each program.
"""
