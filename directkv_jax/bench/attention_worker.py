"""One process of `directkv bench attention`: measures the cases it is sent, one JSON line for each.

The parent sends `{"cases": [...], "repeats": n, "once": bool}` on stdin. Lines on stdout are
`{"peaks": {...}}`, whenever more of them are known, and `{"index": i, "row": {...}}`. With `once`
every case runs a single time and nothing is measured: for a profiler around the process.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from directkv_jax.bench import attention_oracle, baselines, ours, peaks, timing
from directkv_jax.bench.attention_caches import DenseArrays, PagedPool
from directkv_jax.bench.attention_cases import OURS, Case
from directkv_jax.bench.workers import BROKEN


def main() -> int:
    """Runs until the cases are done; `BROKEN` if the device no longer answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this process
    order = json.load(sys.stdin)
    cases = [Case.from_json(fields) for fields in order["cases"]]
    bench = Bench(cases, order["repeats"], order.get("once", False))
    if not bench.once:
        _emit({"peaks": bench.measure_peaks()})
    for index, case in enumerate(cases):
        row = bench.row(case, index)
        if bench.zero_copy.by_bytes:
            _emit({"peaks": {"zero_copy_read": bench.zero_copy.by_bytes}})
        _emit({"index": index, "row": row})
        if row["error"] and not _device_answers():
            return BROKEN
    return 0


def _emit(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _device_answers() -> bool:
    """False after an error that ends the CUDA context, such as an illegal address."""
    try:
        return int(jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.int32(1)))) == 2
    except Exception:
        return False


class Bench:
    """The caches at hand, the peaks, and how a case is measured with them."""

    def __init__(self, cases: list[Case], repeats: int, once: bool):
        self.cases, self.repeats, self.once = cases, repeats, once
        self.cache: PagedPool | DenseArrays | None = None
        self.zero_copy = peaks.ZeroCopyYardstick()
        self.peaks: dict[str, Any] = {}

    def measure_peaks(self) -> dict[str, Any]:
        """The peaks for the placement of the cases, or why they could not be measured."""
        try:
            self.peaks = peaks.measure(self.cases[0].placement)
        except Exception as error:
            self.peaks = {"reason": _text(error)}
        return self.peaks

    def row(self, case: Case, index: int) -> dict[str, Any]:
        """The row of `case`; what it raises is the error in it."""
        row = case.row()
        try:
            if case.implementation in OURS:
                row |= self.measure_ours(case, index)
            else:
                row |= self.measure_baseline(case)
        except Exception as error:
            row |= {"error": _text(error)}
        return row

    def measure_ours(self, case: Case, index: int) -> dict[str, Any]:
        """Figures of an implementation of directkv_jax, over a view of the pool."""
        ours.refuse_unsupported(case)
        pool = self._pool(case, index)
        cache, (query, *new) = pool.view(case), ours.new_tokens(case)
        out = jax.jit(ours.attend_last(case))(query, cache, *new)
        if self.once:
            jax.block_until_ready(out)
            return {}
        exact = attention_oracle.attention(
            query, pool.keys, pool.values, pool.counts(case), fresh=new
        )
        figures: dict[str, Any] = attention_oracle.errors(out, exact)
        program = timing.between_marks(ours.all_layers(case), timing.spin_us(case.layers))
        donated = (1,) if case.appends else ()
        compiled = jax.jit(program, donate_argnums=donated).lower(query, cache, *new).compile()

        def call():
            nonlocal cache
            if not case.appends:
                return compiled(query, cache, *new)
            out, cache = compiled(query, cache, *new)  # lengths stay: the same slots again
            pool.adopt(cache)
            return out

        return figures | self._timed(case, call, compiled, pool.cache.pages)

    def measure_baseline(self, case: Case) -> dict[str, Any]:
        """Figures of a baseline, over dense arrays; of its second variant if the first fails."""
        tried = []
        for variant in baselines.variants(case):
            run = baselines.make(case, variant)
            try:
                figures = self._baseline(case, run)
            except Exception as error:
                tried.append(f"{variant}: {_text(error)}" if variant else _text(error))
                continue
            note = f"attention by {variant}" if variant else None
            return figures | {"note": "; ".join(filter(None, [note, *tried])) or None}
        raise RuntimeError("; ".join(tried))

    def _baseline(self, case: Case, run: Callable[..., Any]) -> dict[str, Any]:
        arrays = self._dense(case)
        query, *_ = ours.new_tokens(case)
        lengths = arrays.lengths if case.ragged or case.implementation == "naive" else None
        if self.once:
            jax.block_until_ready(jax.jit(run)(query, lengths, arrays.layers[0]))
            return {}
        program = timing.between_marks(run, timing.spin_us(case.layers))
        compiled = jax.jit(program).lower(query, lengths, *arrays.layers).compile()

        def call():
            return compiled(query, lengths, *arrays.layers)

        figures = self._timed(case, call, compiled, arrays.layers[0][0])
        out = compiled(query, lengths, *arrays.layers)
        counts, exact = arrays.counts(case), np.asarray(query, np.float32)
        for _ in range(case.layers):
            exact = attention_oracle.attention(exact, arrays.keys, arrays.values, counts)
        return figures | attention_oracle.errors(out, exact)

    def _timed(self, case: Case, call: Callable[[], Any], compiled, data) -> dict[str, Any]:
        """Times, rates, shares; in host memory a plain read of `data` is timed after each call."""
        yardstick = None
        if case.placement == "host" and not case.appends:  # appends donate the data
            yardstick = self.zero_copy.reader(data, case.kv_bytes)
        for _ in range(timing.WARMUPS):
            jax.block_until_ready(call())
        times, shares = [], []
        for _ in range(self.repeats):
            times.append(timing.time_us(call) / case.layers)
            if yardstick:
                read, nbytes = yardstick
                shares.append(case.kv_bytes / nbytes * timing.time_us(read) / times[-1])
        us = timing.median(times)
        rate = case.kv_bytes / us / 1e3
        analysis = compiled.memory_analysis()

        def share(peak: float | None) -> float | None:
            return round(rate / peak, 4) if peak else None

        return {
            "us": round(us, 3),
            "us_all": [round(us, 3) for us in times],
            "hbm_temp_bytes": getattr(analysis, "temp_size_in_bytes", None),
            "gb_per_s": round(rate, 3),
            "tflop_per_s": round(case.flops / us / 1e6, 3),
            "share_of_zero_copy_peak": round(timing.median(shares), 4) if shares else None,
            "share_of_copy_engine": share(self.peaks.get("copy_engine_gb_per_s")),
            "share_of_hbm_peak": share(self.peaks.get("hbm_read", {}).get("gb_per_s")),
        }

    def _pool(self, case: Case, index: int) -> PagedPool:
        """A pool for this case, and for the later ones that can share it if memory allows."""
        key = PagedPool.key_of(case)
        if isinstance(pool := self.cache, PagedPool) and pool.key == key:
            alive = not pool.cache.pages.is_deleted()
            if alive and pool.cache.num_pages >= case.pages:
                return pool
        self._free()
        later = self.cases[index:]
        same = [c for c in later if c.implementation in OURS and PagedPool.key_of(c) == key]
        try:
            pool = PagedPool(same)
        except Exception:  # too large together
            if max(c.pages for c in same) == case.pages:
                raise
            pool = PagedPool([case])
        self.cache = pool
        return pool

    def _dense(self, case: Case) -> DenseArrays:
        key = DenseArrays.key_of(case, baselines.heads_first(case))
        if isinstance(self.cache, DenseArrays) and self.cache.key == key:
            return self.cache
        self._free()
        self.cache = arrays = DenseArrays(case, baselines.heads_first(case))
        return arrays

    def _free(self) -> None:
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.delete()


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:500]}"
