"""A checkpoint folder of random weights: written, loaded, read long prompts, decoded, and planned.

    python benchmarks/checkpoint.py --shape llama-3.1-8b --batch 2 --length 65536 --output \
benchmarks/results

All that happens to a real checkpoint of that shape, at its real size: the folder has a config.json,
safetensors shards and a tokenizer, `models.load` reads it, `models.complete` answers prompts of
random tokens. What `directkv plan` predicts for the step stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from directkv_jax import models
from directkv_jax.bench import record
from directkv_jax.cli.info import link_bandwidth
from directkv_jax.models import families, plan
from directkv_jax.models.names import sources

SHARD_BYTES = 4 << 30
BLOCK = 1 << 21  # random numbers that all weights are made of, over and over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(plan.SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=65536, help="of each prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--placement", choices=("host", "device"), default="host")
    parser.add_argument("--folder", help="where to write the checkpoint; kept (default: temporary)")
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        row = measure(folder, options)
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(row))
    result = {
        **record.stamp(), "benchmark": "checkpoint",
        "command": record.command("python benchmarks/checkpoint.py"), "rows": [row],
    }  # fmt: skip
    if options.output:
        print(record.write(result, f"{record.gpu_slug()}-checkpoint", options.output))


def measure(folder: Path, options) -> dict:
    """The row of one shape."""
    start = time.perf_counter()
    nbytes = write(folder, plan.SHAPES[options.shape])
    written = time.perf_counter()
    print(f"wrote {nbytes / 1e9:.1f} GB in {written - start:.0f} s", file=sys.stderr, flush=True)
    model, tokenizer = models.load(folder)
    jax.block_until_ready(nnx.state(model))
    loaded = time.perf_counter()
    print(f"loaded in {loaded - written:.0f} s", file=sys.stderr, flush=True)
    shape = (options.batch, options.length)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    done = models.complete(
        model, tokenizer, prompts.tolist(), max_new_tokens=options.steps + 1, stop_tokens=(),
        placement=options.placement,
    )  # fmt: skip
    stats = done.stats
    assert stats.new_tokens == options.batch * (options.steps + 1)
    step_s = options.batch / stats.tokens_per_s
    work = plan.Workload(
        options.batch, options.length + options.steps // 2, options.placement,
        np.dtype(model.dtype).name,
    )  # fmt: skip
    expected = plan.make_plan(model.config, work, machine()).step
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "shape": options.shape, "placement": options.placement, "batch": options.batch,
        "length": options.length, "steps": options.steps, "dtype": work.dtype,
        "checkpoint_bytes": nbytes, "write_s": round(written - start, 1),
        "load_s": round(loaded - written, 1), "prefill_s": round(stats.ttft_s, 2),
        "prefill_tokens_per_s": round(stats.prompt_tokens / stats.ttft_s, 1),
        "ms_per_step": round(1e3 * step_s, 2), "tokens_per_s": round(stats.tokens_per_s, 2),
        "planned_ms_per_step": None if expected is None else round(1e3 * expected.total_s, 2),
        "ratio_to_plan": None if expected is None else round(step_s / expected.total_s, 4),
        "hbm_peak_bytes": memory.get("peak_bytes_in_use"),
        **{name: getattr(stats, name) for name in ("kv_bytes_host", "kv_bytes_device")},
    }  # fmt: skip


def machine() -> plan.Machine:
    """The one this runs on, as `directkv plan` sees it."""
    if jax.default_backend() != "gpu":
        return plan.Machine("CPU", one_memory=True)
    kind = jax.local_devices()[0].device_kind
    return plan.Machine.measured(kind, None, 0, link_bandwidth())


def write(folder: Path, values: dict) -> int:
    """Writes the checkpoint of a `config.json`; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**values, "torch_dtype": "bfloat16"}))
    words = {f"w{i}": i for i in range(values["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32)
    shard: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    total, held, count = 0, 0, 0
    shapes = tensors(values)
    for index, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:  # norms and biases
            array = np.ones(shape, ml_dtypes.bfloat16)
        else:
            scaled = (block / np.sqrt(shape[-1])).astype(ml_dtypes.bfloat16)
            array = np.resize(np.roll(scaled, 7919 * index), shape)
        shard[name] = array
        held += array.nbytes
        total += array.nbytes
        if held >= SHARD_BYTES or index == len(shapes) - 1:
            file = f"model-{count:05d}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard, held, count = {}, 0, count + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def tensors(values: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of that configuration."""
    family = families.find(values)
    config = family.config(values)
    abstract = nnx.eval_shape(lambda: models.Transformer(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(abstract))
    return {
        source.name: source.shape
        for path, variable in flat
        for source in sources(family.names, config, path, tuple(variable.get_value().shape))
    }


if __name__ == "__main__":
    main()
