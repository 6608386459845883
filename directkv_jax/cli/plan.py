"""`directkv plan`: whether a model and a context fit, and how long a decode step takes.

Nothing of the model is allocated. Without --gpu it is this machine that is asked about.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from directkv_jax.bench.options import positive, tokens
from directkv_jax.cli.plan_text import lines

DOES_NOT_FIT = 1
INSTALL_MODELS = 'pip install "directkv-jax[models]"'


def add_arguments(parser: argparse.ArgumentParser, size) -> None:
    """The options of `directkv plan`; `size` parses a number of bytes."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a Hugging Face folder or a GGUF file; no weights are read")
    what.add_argument("--shape", metavar="NAME", help="a model by name, as llama-3.1-8b")
    add(
        "--context", type=tokens, required=True, metavar="S",
        help="tokens of prompt and answer; 128k is 131072",
    )  # fmt: skip
    add("--batch", type=positive, default=1, metavar="B", help="rows (default: 1)")
    add("--kv", choices=("host", "device"), default="host", help="where the KV cache lives")
    add(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of weights and cache (default: float32 on a CPU, else bfloat16)",
    )  # fmt: skip
    add("--gpu", metavar="NAME", help="of another machine, by published figures, as gh200")
    add(
        "--host-memory", type=size, metavar="BYTES",
        help='that can be page-locked, as "200G" (default: three quarters of what is free here; '
        "with --gpu, what comes with it, if anything)",
    )  # fmt: skip
    add("--page-size", type=positive, default=64, help="tokens per page (default: %(default)s)")
    add(
        "--prefill-bytes", type=size, default=1 << 30, metavar="BYTES",
        help="as of `directkv generate` (default: 1G)",
    )  # fmt: skip
    add("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. The exit status is 1 if it does not fit."""
    report = collect(arguments)
    print(json.dumps(report) if arguments.json else "\n".join(lines(report)))
    return DOES_NOT_FIT if report["fits"] is False else 0


def collect(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything as one JSON-able mapping. Bytes are ints, times seconds, null what is not known.

    Raises:
      ValueError, FileNotFoundError: a name is unknown, or the model cannot be read.
      ImportError: the `models` extra is not installed.
    """
    try:
        from directkv_jax.models import loading, plan
    except ModuleNotFoundError as error:
        raise ImportError(
            f"planning needs the package `{error.name}`. Install it with: {INSTALL_MODELS}"
        ) from error
    if arguments.shape is not None:
        name, config = arguments.shape, plan.shape(arguments.shape)
    else:
        name, config = Path(arguments.model).name, loading.load_config(arguments.model)
    if arguments.gpu is None:
        machine = _here(plan, arguments.host_memory)
    else:
        gpu = plan.find_gpu(arguments.gpu)
        machine = plan.Machine.published(arguments.gpu, gpu, arguments.host_memory)
    work = plan.Workload(
        batch=arguments.batch,
        context=arguments.context,
        placement=arguments.kv,
        dtype=arguments.dtype or ("float32" if machine.one_memory else "bfloat16"),
        page_size=arguments.page_size,
        prefill_bytes=arguments.prefill_bytes,
    )
    made = plan.make_plan(config, work, machine)
    other = "device" if arguments.kv == "host" else "host"
    moved = plan.make_plan(config, dataclasses.replace(work, placement=other), machine)
    ropes = (layer.rope for layer in config.layers if layer.rope is not None)
    return {
        "model": name,
        "layers": len(config.layers),
        "experts": any(layer.experts is not None for layer in config.layers),
        "max_position_embeddings": config.max_position_embeddings,
        "learned_positions": config.learned_positions > 0,
        "rope_scaling": next((dict(rope.scaling).get("rope_type") for rope in ropes), None),
        "workload": dataclasses.asdict(work),
        "machine": {**dataclasses.asdict(machine), "published": arguments.gpu is not None},
        "sizes": {**dataclasses.asdict(made.sizes), "device_bytes": made.sizes.device_bytes},
        **_verdict(made),
        "largest_context": plan.largest_context(config, work, machine),
        "largest_batch": plan.largest_batch(config, work, machine),
        "smaller_prefill_bytes": plan.smaller_prefill_bytes(config, work, machine),
        "other_placement": {"placement": other, **_verdict(moved)},
    }


def _verdict(plan) -> dict[str, Any]:
    def memory(side):
        return None if side is None else {**dataclasses.asdict(side), "fits": side.fits}

    step = None
    if plan.step is not None:
        total = plan.step.total_s
        step = {
            **dataclasses.asdict(plan.step),
            "total_s": total,
            "tokens_per_s": plan.work.batch / total,
            "bound": plan.step.bound,
        }
    return {
        "fits": plan.fits,
        "host": memory(plan.host),
        "device": memory(plan.device),
        "step": step,
    }


def _here(plan, host_bytes: int | None):
    """The machine this runs on. On a GPU the link is measured, by copies of up to 160 MiB."""
    import jax

    from directkv_jax.bench.decode_child import usable_host_bytes
    from directkv_jax.cli.info import link_bandwidth

    host_bytes = usable_host_bytes() if host_bytes is None else host_bytes
    if jax.default_backend() != "gpu":
        return plan.Machine("this machine, without a GPU", host_bytes=host_bytes, one_memory=True)
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return plan.Machine.measured(
        device.device_kind, stats.get("bytes_limit"), host_bytes, link_bandwidth()
    )
