"""A long prompt read in chunks into a host cache: by our kernels, and staged by plain JAX.

    python benchmarks/prefill.py --length 131072 --chunk 2048 --output benchmarks/results

One row of random tokens, a model with random weights. "staged" keeps keys and values in page-locked
host arrays, a pair for each chunk and layer; a layer copies what is there to the device, attends to
it with cuDNN, to its own chunk too, and the two results are merged by their log-sum-exps. XLA
compiles it anew for every number of chunks, which is not timed. One run of this script measures one
placement, because the peak of device memory is that of a process: call it once for each.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from directkv_jax import KVCache, memory
from directkv_jax.bench import record
from directkv_jax.bench.decode_caches import one_device
from directkv_jax.bench.decode_cases import SHAPES, Case
from directkv_jax.bench.decode_model import RandomModel
from directkv_jax.models.reading import PromptReader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--placement", choices=("host", "device", "staged"), default="host")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--output", metavar="DIR", help="of the record")
    options = parser.parse_args()
    case = Case(options.shape, options.placement, 1, options.length, options.layers)
    cache = None
    if options.placement != "staged":
        cache = KVCache.create(
            1, options.length, num_kv_heads=case.config["num_key_value_heads"],
            head_dim=case.config["head_dim"], num_layers=case.config["num_hidden_layers"],
            placement=options.placement,
        )  # fmt: skip
    beside = memory.beside(cache.pages) if cache else one_device("device")
    model = RandomModel(case.config, beside)
    weights = model.make_weights()
    llama = model.module(weights)
    tokens = np.random.default_rng(0).integers(0, case.config["vocab_size"], (1, options.length))
    tokens = jax.device_put(tokens.astype(np.int32), beside)
    if cache:
        seconds, compile_s = ours(llama, tokens, cache, options)
    else:
        seconds, compile_s = staged(llama, tokens, options)
    stats = jax.local_devices()[0].memory_stats() or {}
    row = {
        "shape": options.shape, "layers": case.config["num_hidden_layers"],
        "placement": options.placement, "length": options.length, "chunk": options.chunk,
        "seconds": round(seconds, 3), "tokens_per_s": round(options.length / seconds, 1),
        "compile_s": round(compile_s, 1), "weight_bytes": sum(array.nbytes for array in weights),
        "hbm_peak_bytes": stats.get("peak_bytes_in_use"),
    }  # fmt: skip
    print(json.dumps(row))
    result = {
        **record.stamp(), "benchmark": "prefill",
        "command": record.command("python benchmarks/prefill.py"), "rows": [row],
    }  # fmt: skip
    if options.output:
        name = f"{record.gpu_slug()}-prefill-{options.placement}"
        print(record.write(result, name, options.output))


def ours(model, tokens, cache: KVCache, options) -> tuple[float, float]:
    """(seconds of reading, of compiling) with `PromptReader`."""
    chunks = [options.chunk] * (options.length // options.chunk)
    lengths = jnp.full_like(cache.lengths, options.length)
    reader = PromptReader(model)
    start = time.perf_counter()
    reader.compile(tokens, lengths, chunks, cache)
    compiled = time.perf_counter()
    last, cache = reader.read(tokens, lengths, chunks, cache, progress)
    last.block_until_ready()
    seconds = time.perf_counter() - compiled
    assert cache.lengths.tolist() == [options.length]
    assert bool(jnp.isfinite(last).all())
    cache.delete()
    return seconds, compiled - start


def staged(model, tokens, options) -> tuple[float, float]:
    """The same in plain JAX, compiled for every number of chunks."""
    layers = [nnx.split(layer) for layer in model.layers]
    graphdef = layers[0][0]
    host: list[list[Any]] = [[] for _ in layers]  # of each layer: (keys, values) of each chunk

    @jax.jit
    def one(params, x, start, history):
        def attend(x, projection, cache, *, rope, **options):
            del cache, options
            positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            new = [part.astype(x.dtype) for part in projection(x, positions, rope)]
            parts = [_attention(*new, is_causal=True)]
            if history:
                cached = jax.device_put(history, jax.memory.Space.Device)
                keys, values = (jnp.concatenate(side, axis=1) for side in zip(*cached, strict=True))
                parts.append(_attention(new[0], keys, values))
            return _merged(parts), tuple(new[1:])

        x, new = nnx.merge(graphdef, params)(x, None, 0, options.length, attend)
        return x, jax.device_put(new, jax.memory.Space.Host)

    seconds = compile_s = 0.0
    for index in range(options.length // options.chunk):
        start = index * options.chunk
        part = tokens[:, start : start + options.chunk]
        x = model.embed(part, start + jnp.arange(options.chunk)[None])
        begin = time.perf_counter()
        at = jnp.int32(start)
        program = one.lower(layers[0][1], x, at, host[0]).compile()
        compile_s += time.perf_counter() - begin
        begin = time.perf_counter()
        for (_, params), chunks in zip(layers, host, strict=True):
            x, new = program(params, x, at, chunks)
            chunks.append(new)
        x.block_until_ready()
        seconds += time.perf_counter() - begin
        progress(index + 1, options.length // options.chunk)
    assert bool(jnp.isfinite(x).all())
    return seconds, compile_s


def _attention(query, key, value, **options):
    cudnn = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        query, key, value, implementation=cudnn, return_residual=True, **options
    )


def _merged(parts):
    """Softmaxes over disjoint tokens as one: (out [B, T, N, H], lse [B, T, N]) each."""
    outs, logs = zip(*parts, strict=True)
    top = functools.reduce(jnp.maximum, logs)
    weights = [jnp.exp(log - top)[..., None] for log in logs]
    merged = sum(w * out for w, out in zip(weights, outs, strict=True)) / sum(weights)
    return merged.astype(outs[0].dtype)


def progress(done: int, total: int) -> None:
    """A line on stderr now and then."""
    if done * 8 // total != (done - 1) * 8 // total:
        print(f"{done} of {total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
