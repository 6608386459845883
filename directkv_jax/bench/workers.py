"""Runs measurements in processes of their own: a case that crashes or hangs costs its own row only.

JAX's peak of device memory cannot be reset and its memory limit is fixed at the start, so processes
are also what keeps one measurement from showing in the next. The parent never starts JAX's backend.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

BROKEN = 3  # exit status of a worker whose device no longer answers, after its last row
CASE_TIMEOUT_S = 300.0


def run_cases(
    command: Sequence[str],
    cases: Sequence[dict[str, Any]],
    order: dict[str, Any],
    env: dict[str, str] | None = None,
    timeout_s: float = CASE_TIMEOUT_S,
) -> Iterator[dict[str, Any]]:
    """Yields what workers say of the cases, one message for each case at least, in order.

    A worker gets `{**order, "cases": [...]}` on stdin and prints `{"index": i, "row": {...}}` for
    case i of them, and what else it likes to report. One that ends early or says nothing for
    `timeout_s` seconds is replaced by another for the cases that are left.

    Args:
      command: arguments after `python -m directkv_jax`.
      cases: JSON objects.
      order: what else the worker is told.
      env: variables added to its environment.
      timeout_s: longest silence.

    Yields:
      the worker's messages with `index` counted over all `cases`, and for a case that brought its
      worker down `{"index": i, "error": text}`.
    """
    done = 0
    while done < len(cases):
        begin, error, silent = done, "the process ended early", True
        with _worker(command, {**order, "cases": list(cases[begin:])}, env) as worker:
            for message in _messages(worker, timeout_s):
                if isinstance(message, str):
                    error = message
                    break
                silent = False
                if "index" in message:
                    message["index"] += begin
                    done = message["index"] + 1
                yield message
        if worker.returncode == BROKEN and done > begin:
            continue
        # Where not even the first message came, the next process would fare the same.
        for index in range(done, len(cases) if silent else min(done + 1, len(cases))):
            yield {"index": index, "error": error}
            done = index + 1


@contextlib.contextmanager
def _worker(command, order, env) -> Iterator[subprocess.Popen]:
    """The process with its order given; ended, by force if need be, on the way out."""
    # -P: the installed package runs, not a folder of its sources in the current directory.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "directkv_jax", *command], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
    )  # fmt: skip
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            json.dump(order, process.stdin)
            process.stdin.close()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


def _messages(process: subprocess.Popen, timeout_s: float) -> Iterator[dict[str, Any] | str]:
    """The process's JSON lines; a text at last if it did not end well, or not in time."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            yield f"nothing happened for {timeout_s:.0f} s; the process was ended"
            return
        if line is None:
            break
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(line, end="", file=sys.stderr)
    status = process.wait()
    if status < 0:
        name = signal.Signals(-status).name
        yield f"the process was killed by {name}" + (" (out of memory?)" if -status == 9 else "")
    elif status:
        yield f"the process ended with exit status {status}"
