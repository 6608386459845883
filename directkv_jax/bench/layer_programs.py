"""What `directkv bench layer` times, and with what: weights, caches and the three programs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import directkv_jax
from directkv_jax import KVCache, QKVProjection, RoPE
from directkv_jax.bench import peaks, timing
from directkv_jax.bench.attention_caches import PagedPool
from directkv_jax.bench.attention_cases import ITEMSIZE, Case
from directkv_jax.rope import rotate


class Bench:
    """The weights of L layers, and how a case is measured with them."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.heads, self.kv_heads = arguments.heads
        self.head_dim, self.layers = arguments.head_dim, arguments.layers
        self.width, self.dtype = self.heads * self.head_dim, arguments.dtype
        self.rope = RoPE.create(self.head_dim, theta=5e5)
        self.peaks = {**peaks.measure("device"), **peaks.measure("host")}
        if timing.on_cuda():
            host = directkv_jax.memory.allocate((peaks.COPY_BYTES // 4,), jnp.float32, "host")
            self.peaks["zero_copy"] = peaks.read_gb_per_s(host, host.nbytes, peaks.HOST_CTAS)
            host.delete()
        columns = (self.kv_heads, self.heads // self.kv_heads + 2, self.head_dim)
        keys = jax.random.split(jax.random.key(0), self.layers)
        draw = jax.jit(lambda key: _kernel(key, (self.width, *columns), self.dtype))
        self.weights = [draw(key) for key in keys]
        self.reference: dict[tuple, np.ndarray] = {}

    def row(self, placement: str, length: int, batch: int, implementation: str) -> dict[str, Any]:
        """The row of a case; what it raises is the error in it."""
        nbytes = {
            "weight_bytes": self.weights[0].nbytes,
            "kv_bytes": 2 * batch * length * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype],
        }
        row = {
            "placement": placement, "implementation": implementation, "batch": batch,
            "length": length, "width": self.width, "num_query_heads": self.heads,
            "num_kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype,
            "layers": self.layers, **nbytes, "bound_us": self._bound_us(placement, **nbytes),
            "us": None, "us_all": None, "share_of_bound": None, "difference": None, "error": None,
        }  # fmt: skip
        try:
            out, times = self._measure(placement, length, batch, implementation)
        except Exception as error:
            text = " ".join(str(error).split())
            return row | {"error": f"{type(error).__name__}: {text[:500]}"}
        us = timing.median(times)
        row |= {"us": round(us, 3), "us_all": [round(time, 3) for time in times]}
        if row["bound_us"]:
            row["share_of_bound"] = round(row["bound_us"] / us, 4)
        if implementation != "jax":  # whose cache holds other tokens
            out = np.asarray(out, np.float32)
            first = self.reference.setdefault((placement, length, batch), out)
            row["difference"] = float(np.linalg.norm(out - first) / np.linalg.norm(first))
        return row

    def _bound_us(self, placement: str, weight_bytes: int, kv_bytes: int) -> float | None:
        hbm = self.peaks.get("hbm_read", {}).get("gb_per_s")
        link = self.peaks.get("zero_copy", {}).get("gb_per_s")
        if not hbm or not link:
            return None
        if placement == "device":
            return round((weight_bytes + kv_bytes) / hbm / 1e3, 3)
        return round(max(weight_bytes / hbm, kv_bytes / link) / 1e3, 3)

    def _measure(self, placement: str, length: int, batch: int, implementation: str):
        x = jax.random.normal(jax.random.key(1), (batch, 1, self.width), jnp.dtype(self.dtype))
        cache: Any
        if implementation == "jax":
            cache = DenseCache.create(self, batch, length)
        else:
            case = Case(
                placement, "cuda", (length,) * batch, self.heads, self.kv_heads, self.head_dim,
                self.dtype, layers=self.layers, appends=True,
            )  # fmt: skip
            pool = PagedPool([case])
            cache = pool.view(case)
        program = timing.between_marks(self._program(implementation), timing.spin_us(self.layers))
        compiled = jax.jit(program, donate_argnums=1).lower(x, cache, self.weights).compile()

        def call():
            nonlocal cache
            out, cache = compiled(x, cache, self.weights)  # lengths stay: the same slots again
            return out

        times = timing.times_us(call, self.arguments.repeats)
        out = call()
        jax.block_until_ready(out)
        cache.delete()
        return out, [time / self.layers for time in times]

    def _program(self, implementation: str) -> Callable[..., Any]:
        """(x `[B, 1, D]`, cache, weights) -> (x, cache): the output of a layer feeds the next."""
        programs: dict[str, Callable[..., Any]] = {
            "fused": self._fused, "unfused": self._unfused, "jax": self._jax
        }  # fmt: skip
        one = programs[implementation]

        def program(x, cache, weights):
            for layer, kernel in enumerate(weights):
                x, kernel = timing.after(x, kernel)
                out, cache = one(x, QKVProjection(kernel), cache, layer)
                x = out.reshape(x.shape)
            return x, cache

        return program

    def _fused(self, x, projection: QKVProjection, cache: KVCache, layer: int):
        return directkv_jax.qkv_attention(x, projection, cache, layer=layer, rope=self.rope)

    def _unfused(self, x, projection: QKVProjection, cache: KVCache, layer: int):
        parts = projection(x, cache.lengths[:, None], self.rope)
        query, key, value = (part.astype(x.dtype) for part in parts)
        return directkv_jax.decode_attention(query, key, value, cache, layer=layer)

    def _jax(self, x, projection: QKVProjection, cache: DenseCache, layer: int):
        """As plain JAX writes it: rounded after the product, one position for all rows."""
        kernel = projection.kernel
        y = x @ kernel.reshape(self.width, -1)
        y = y.reshape(*x.shape[:2], *kernel.shape[1:])
        query = y[:, :, :, :-2].reshape(*x.shape[:2], self.heads, self.head_dim)
        turns = self.rope.rotations(cache.lengths[:, None])
        query, key = rotate(query, turns), rotate(y[:, :, :, -2], turns)
        keys, values = cache.layers[layer]
        at = cache.lengths[0]
        keys = jax.lax.dynamic_update_slice_in_dim(keys, key, at, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, y[:, :, :, -1], at, axis=1)
        out = jax.nn.dot_product_attention(
            query, keys, values, key_value_seq_lengths=cache.lengths + 1,
            implementation="cudnn" if timing.on_cuda() else "xla",
        )  # fmt: skip
        layers = (*cache.layers[:layer], (keys, values), *cache.layers[layer + 1 :])
        return out, DenseCache(layers, cache.lengths)


def _kernel(key, shape, dtype):
    return shape[0] ** -0.5 * jax.random.normal(key, shape, jnp.dtype(dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Keys and values `[B, S + 64, K, H]` of every layer, and lengths int32 `[B]`."""

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    lengths: jax.Array

    @classmethod
    def create(cls, bench: Bench, batch: int, length: int) -> DenseCache:
        """Random tokens, on the device."""
        shape = (batch, length + 64, bench.kv_heads, bench.head_dim)
        draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, bench.dtype))
        layers = tuple((draw(2 * i), draw(2 * i + 1)) for i in range(bench.layers))
        return cls(layers, jnp.full((batch,), length, jnp.int32))

    def delete(self) -> None:
        """Frees the arrays."""
        for array in jax.tree.leaves(self.layers):
            array.delete()
