"""The figures of `directkv bench plot`: rows in, a Matplotlib `Figure` out.

Colours are those of Okabe and Ito, which all kinds of colour vision tell apart; every line has a
marker of its own besides. Figures are made without pyplot, so nothing is global or on a screen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from directkv_jax.bench.plot import Rows, out_of_memory

GREY = "#666666"
_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
# placement: label, colour, marker
_STYLES = {
    "host": ("directkv_jax, cache in host memory", "#0072B2", "o"),
    "device": ("directkv_jax, cache in HBM", "#56B4E9", "s"),
    "staged": ("plain JAX, staged a layer ahead", "#E69F00", "^"),
    "hbm-jax": ("plain JAX, cache in HBM", "#D55E00", "D"),
    "hf-offloaded": ("Hugging Face, offloaded cache", "#CC79A7", "v"),
    "hf-dynamic": ("Hugging Face, cache in HBM", "#000000", "P"),
}


def shares(rows: Rows, footnote: str) -> Figure:
    """Share of the zero-copy peak against the context, a line for each batch."""
    figure, axes = _new(f"How much of the link the kernel uses\n{_heads(rows[0])}", footnote)
    for index, batch in enumerate(sorted({row["batch"] for row in rows})):
        line = _medians(
            (row["length"], row["share_of_zero_copy_peak"]) for row in rows if row["batch"] == batch
        )
        axes.plot(*line, label=f"B = {batch}", **_numbered(index))
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--", zorder=1)
    _lengths(axes, rows)
    axes.set_ylabel("share of a plain SM read of the same bytes")
    axes.set_ylim(0, max(1.1, *axes.get_ylim()))
    axes.legend(loc="lower right")
    return figure


def ctas(rows: Rows, footnote: str) -> Figure:
    """GB/s against the thread blocks given to the kernel, a line for each batch and length."""
    figure, axes = _new(f"Thread blocks the link needs\n{_heads(rows[0])}", footnote)
    for index, (batch, length) in enumerate(sorted({(r["batch"], r["length"]) for r in rows})):
        line = _medians(
            (row["num_ctas"], row["gb_per_s"])
            for row in rows
            if (row["batch"], row["length"]) == (batch, length)
        )
        axes.plot(*line, label=f"B = {batch}, S = {tokens(length)}", **_numbered(index))
    known = [r for r in rows if r.get("share_of_zero_copy_peak")]
    if known:
        peak = statistics.median(r["gb_per_s"] / r["share_of_zero_copy_peak"] for r in known)
        axes.axhline(peak, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            f"plain SM read: {peak:.1f} GB/s", (0.01, peak), xycoords=("axes fraction", "data"),
            xytext=(2, 3), textcoords="offset points", color=GREY, fontsize=8,
        )  # fmt: skip
    _log2(axes, sorted({row["num_ctas"] for row in rows}), str)
    axes.set_xlabel("thread blocks")
    axes.set_ylabel("GB/s of keys and values")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    axes.legend(loc="lower right")
    return figure


def decode_time(rows: Rows, footnote: str) -> Figure:
    """Milliseconds a step against the context, and where each placement runs out of memory."""
    figure, axes = _new(f"Time of a decode step\n{_model(rows[0])}", footnote)
    placements = _placements(rows)
    for name in placements:
        line = _medians(
            (row["length"], row["ms_per_step"])
            for row in rows
            if row["placement"] == name and row.get("ms_per_step")
        )
        if line[0]:
            axes.plot(*line, **_style(name))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _lengths(axes, rows)
    axes.set_ylabel("ms per step")
    _mark_out_of_memory(axes, rows, placements)
    _legend_beside(figure)
    return figure


def _mark_out_of_memory(axes: Axes, rows: Rows, placements: list[str]) -> None:
    """A cross above the axis at the shortest context that did not fit; its height means nothing."""
    level = 0.06
    for name in placements:
        failed = [r["length"] for r in rows if r["placement"] == name and out_of_memory(r)]
        if not failed:
            continue
        _, color, _ = _STYLES.get(name, (name, GREY, "x"))
        axes.axvline(min(failed), color=color, linewidth=1, linestyle=":", zorder=1)
        axes.plot(
            [min(failed)], [level], transform=axes.get_xaxis_transform(), color=color, marker="X",
            markersize=9, linestyle="none", clip_on=False, label=f"{name}: out of memory",
        )  # fmt: skip
        level += 0.07


def decode_memory(rows: Rows, footnote: str) -> Figure:
    """Peak of device memory against the context, beside what the weights take."""
    figure, axes = _new(f"Peak of device memory\n{_model(rows[0])}", footnote)
    for name in _placements(rows):
        line = _medians(
            (row["length"], row["hbm_peak_bytes"] / 2**30)
            for row in rows
            if row["placement"] == name
        )
        axes.plot(*line, **_style(name))
    weights = rows[0]["parameter_bytes"] / 2**30
    axes.axhline(weights, color=GREY, linewidth=1, linestyle="--", label="weights", zorder=1)
    if limit := rows[0].get("hbm_limit_gb"):
        axes.axhline(
            limit * 1e9 / 2**30, color=GREY, linewidth=1, linestyle=":", label="limit", zorder=1
        )
    _lengths(axes, rows)
    axes.set_ylabel("GiB")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    _legend_beside(figure)
    return figure


def _legend_beside(figure: Figure) -> None:
    """To the right of the axes, where it hides nothing."""
    figure.set_figwidth(9.5)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)


def tokens(count: float) -> str:
    """32768 -> "32k"."""
    count = round(count)
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def _new(title: str, footnote: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.4 + 0.12 * footnote.count("\n")), layout="constrained")
    axes = figure.add_subplot()
    heading, _, detail = title.partition("\n")
    figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes.set_title(detail, loc="left", fontsize=9, color=GREY)
    figure.supxlabel(footnote, x=0.01, ha="left", fontsize=6.5, color=GREY)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _lengths(axes: Axes, rows: Rows) -> None:
    _log2(axes, sorted({row["length"] for row in rows}), tokens)
    axes.set_xlabel("context, tokens in each row")


def _log2(axes: Axes, values: list[int], label: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(round(value))))
    axes.set_xlim(values[0] / 2**0.25, values[-1] * 2**0.25)


def _medians(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y sorted by x; several y of one x, from several records, give their median."""
    by_x: dict[float, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    return sorted(by_x), [statistics.median(by_x[x]) for x in sorted(by_x)]


def _numbered(index: int) -> dict[str, Any]:
    place = index % len(_CYCLE)
    return {"color": _CYCLE[place], "marker": _MARKERS[place], "markersize": 5}


def _style(placement: str) -> dict[str, Any]:
    label, color, marker = _STYLES.get(placement, (placement, GREY, "x"))
    return {"label": label, "color": color, "marker": marker, "markersize": 5}


def _placements(rows: Rows) -> list[str]:
    """Those of the rows, ours first."""
    found = {row["placement"] for row in rows}
    return [*(name for name in _STYLES if name in found), *sorted(found - set(_STYLES))]


def _heads(row: dict[str, Any]) -> str:
    new = "1 new token" if row["query_tokens"] == 1 else f"{row['query_tokens']} new tokens"
    return (
        f"{row['num_query_heads']} query and {row['num_kv_heads']} KV heads of {row['head_dim']}, "
        f"{row['dtype']}, {new}; cache in host memory"
    )


def _model(row: dict[str, Any]) -> str:
    limit = f", HBM limited to {row['hbm_limit_gb']:g} GB" if row.get("hbm_limit_gb") else ""
    return f"{row['shape']}, {row['layers']} layers, B = {row['batch']}, {row['dtype']}{limit}"
