"""What `directkv plan` says to people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Report = dict[str, Any]


def lines(report: Report) -> Iterator[str]:
    """The plan, then what to know of it and what would change it."""
    work, sizes = report["workload"], report["sizes"]
    yield f"model      {report['model']}: {sizes['parameters'] / 1e9:.2f}e9 parameters, " + (
        f"{gib(sizes['weight_bytes'])} of weights in {work['dtype']}"
    )
    rows = "1 row" if work["batch"] == 1 else f"{work['batch']} rows"
    yield f"workload   {rows} of {work['context']} tokens, " + (
        f"{sizes['kv_bytes_per_token'] / 1024:g} KiB of keys and values per token"
    )
    yield from _machine(report["machine"])
    yield from _memory(report)
    answers = {True: "yes", False: "no", None: "not known: host memory is not given"}
    yield f"fits       {answers[report['fits']]}"
    yield from _step(report["step"], report["machine"])
    for note in notes(report):
        yield f"note       {note}"
    for hint in hints(report):
        yield f"change     {hint}"


def notes(report: Report) -> Iterator[str]:
    """What one should know before believing the plan."""
    work, machine = report["workload"], report["machine"]
    longest = report["max_position_embeddings"]
    if work["context"] > longest:
        if report["learned_positions"]:
            remedy = "there are no positions beyond it"
        elif report["rope_scaling"]:
            remedy = f"RoPE is scaled ({report['rope_scaling']}), for contexts up to that"
        else:
            remedy = "RoPE is not scaled"
        yield f"{work['context']} tokens are more than max_position_embeddings {longest}; {remedy}"
    if layers := report["sizes"]["ring_layers"]:
        yield (
            f"{layers} of {report['layers']} layers have a sliding window and keep a ring of pages "
            "on the device: their share of a token's bytes does not grow with the context"
        )
    if not report["step"]:
        return
    if not machine["validated"]:
        yield "the time is not validated on this hardware: an H200's shares of peaks are assumed"
    if report["experts"]:
        yield "experts were not measured: a step is taken to read each chosen one once"
    if work["dtype"] == "float32":
        yield "float32 was not measured: its attention computes without tensor cores"


def hints(report: Report) -> Iterator[str]:
    """What would make it fit, or faster, or how much more would fit."""
    work, machine = report["workload"], report["machine"]
    context, batch = report["largest_context"], report["largest_batch"]
    if context == 0 and batch == 0:
        yield "no context and no batch fits: the weights leave no room"
    elif context is not None and batch is not None:
        yield f"{context or 'no'} tokens are the most that fit at batch {work['batch']}"
        yield f"{batch or 'no'} rows are the most that fit at {work['context']} tokens"
    if smaller := report["smaller_prefill_bytes"]:
        yield f"--prefill-bytes {smaller >> 20}M fits: prompts are read in smaller chunks"
    if not machine["one_memory"]:
        yield from _other_placement(report)
        need, total = report["device"], machine["device_total_bytes"]
        if need["fits"] is False and total and need["needed"] < 0.95 * total:
            yield (
                "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment lets JAX take enough of "
                "the device's memory"
            )
    if report["fits"] is False and work["dtype"] == "float32":
        yield "--dtype bfloat16 takes half of the bytes"
    if report["host"]["fits"] is None:
        yield "--host-memory BYTES says how much can be page-locked there"


def _other_placement(report: Report) -> Iterator[str]:
    other, step = report["other_placement"], report["step"]
    if other["fits"] is False or (other["fits"] is None and report["fits"] is not False):
        return
    # Into device memory because it is faster, into host memory because it fits.
    if other["placement"] == "device" or report["fits"] is False:
        fits = "fits" if other["fits"] else "fits the device"
        time = f", {ms(other['step']['total_s'])} a step" if step else ""
        yield f"--kv {other['placement']} {fits}{time}"


def _machine(machine: Report) -> Iterator[str]:
    yield f"machine    {machine['name']}{', by published figures' if machine['published'] else ''}"
    link, hbm = machine["link_bytes_per_s"], machine["hbm_bytes_per_s"]
    if link and hbm:
        yield f"             reads host memory at {gb(link)}, device memory at {gb(hbm)}"


def _memory(report: Report) -> Iterator[str]:
    sizes, host, device = report["sizes"], report["host"], report["device"]
    cache = sizes["kv_device_bytes"] + (0 if device else sizes["kv_host_bytes"])
    yield f"host       {_needed(host)}"
    if device:
        total = report["machine"]["device_total_bytes"]
        whole = f", JAX's default share of {gib(total)}" if report["machine"]["published"] else ""
        yield f"device     {_needed(device)}{whole}"
    yield f"             weights {gib(sizes['weight_bytes'])}, cache {gib(cache)}, " + (
        f"activations {gib(sizes['activation_bytes'])} (chunks of {sizes['prefill_chunk']} tokens)"
    )


def _needed(side: Report) -> str:
    available = "unknown" if side["available"] is None else gib(side["available"])
    return f"{gib(side['needed'])} needed, available: {available}"


def _step(step: Report | None, machine: Report) -> Iterator[str]:
    if step is None:
        why = "there is no GPU" if machine["one_memory"] else "this GPU's bandwidth is not known"
        yield f"step       time unknown: {why}"
        return
    yield f"step       {ms(step['total_s'])} at the full context, {step['tokens_per_s']:.4g} " + (
        f"tokens/s, bound by {step['bound']}"
    )
    yield f"             cache over the link {ms(step['link_s'])}, cache in device memory " + (
        f"{ms(step['kv_s'])}, weights {ms(step['weights_s'])}, rest {ms(step['layers_s'])}"
    )


def gib(nbytes: int) -> str:
    """Bytes in GiB."""
    return f"{nbytes / 2**30:.2f} GiB"


def gb(rate: float) -> str:
    """Bytes per second in GB/s."""
    return f"{rate / 1e9:.4g} GB/s"


def ms(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{seconds * 1e3:.4g} ms"
