"""Compiles directkv_jax for an NVIDIA H200, which need not be here; checks that no cache is copied.

Prints one line for each program of `tests/compile_check`; exit status 1 if one is wrong.
`--json` prints one JSON object for each instead, `-k TEXT...` takes those whose name contains one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of the slow controls, rightly

import jax

jax.config.update("jax_platforms", "cpu")  # the CUDA plugin then loads without a driver
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from compile_check import hlo, target  # noqa: E402
from compile_check.flax_programs import flax_programs  # noqa: E402
from compile_check.programs import Program, core_programs  # noqa: E402


def main() -> int:
    """Compiles and checks all; exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-k", nargs="+", default=[""], metavar="TEXT")
    options = parser.parse_args()
    if reason := target.missing():
        print(f"The compile check {reason}.")
        return 1
    handlers = target.register_handlers()
    if not options.json:
        print(f"jax {jax.__version__}, for an NVIDIA H200; with {handlers}")
    failed = passed = 0
    for program in core_programs() + flax_programs():
        if not any(text in program.name for text in options.k):
            continue
        start = time.monotonic()
        cache_bytes, temp, problems = _run(program)
        good = cache_bytes > 0 and bool(problems) == program.copies
        failed, passed = failed + (not good), passed + good
        if program.copies and not problems:
            problems = ["this control copies the cache, and the check did not see it"]
        row = {"program": program.name, "ok": good, "control": program.copies,
               "cache_bytes": cache_bytes, "hbm_temp_bytes": temp, "problems": problems,
               "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
        print(json.dumps(row) if options.json else _line(row), flush=True)
    if not options.json:
        print(f"compile check: {passed} passed, {failed} failed")
    return 1 if failed else 0


def _run(program: Program) -> tuple[int, int, list[str]]:
    try:
        lowered, cache = program.lower()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not program.copies:
                raise
            return cache.nbytes, 0, [f"XLA does not compile it: {_first_line(error)}"]
        found = hlo.examine(
            compiled, cache.nbytes // program.shards, cache.num_layers, target.TARGETS
        )
    except Exception as error:  # the other programs still say what they are
        traceback.print_exc(limit=-4)
        return 0, 0, [f"{type(error).__name__}: {_first_line(error)}"]
    return found.cache_bytes, found.hbm_temp_bytes, list(found.problems)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _line(row) -> str:
    mark = "ok " if row["ok"] else "BAD"
    text = (
        f"{mark} {row['program']:<52} cache {row['cache_bytes'] / 2**30:6.2f} GiB, "
        f"HBM temp {row['hbm_temp_bytes'] / 2**20:8.2f} MiB, {row['seconds']:4.1f} s"
    )
    if row["ok"] and row["control"]:
        return f"{text}  caught: {row['problems'][0][:60]}"
    return "\n      ".join([text, *(problem[:160] for problem in row["problems"][:6])])


if __name__ == "__main__":
    sys.exit(main())
