"""A model with random weights, and the jitted decode step that `directkv bench decode` times."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from directkv_jax.models import ModelConfig, Transformer


class RandomModel:
    """A `Transformer` taken apart: the structure is static, the weights are arguments of the step.

    The weights do not exist until `make_weights`: a step compiled before that, against
    `abstract_weights`, leaves the buffers in which XLA tries its matmuls out of the memory peak.

    Args:
      config: shapes under Hugging Face's names.
      sharding: where the weights go; that of the small arrays beside the cache.
    """

    def __init__(self, config: dict[str, Any], sharding: jax.sharding.Sharding):
        values = {"model_type": "llama", "max_position_embeddings": 131072, **config}
        llama = ModelConfig.from_dict({"rms_norm_eps": 1e-5, **values})

        def build():
            return Transformer(llama, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

        self.config = llama
        self._graphdef, state = nnx.split(nnx.eval_shape(build))
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(state)
        self.abstract_weights = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for _, leaf in leaves
        ]
        self._kinds = [_kind(jax.tree_util.keystr(path)) for path, _ in leaves]

    def make_weights(self) -> list[jax.Array]:
        """Random weights, drawn on the device one array at a time, the largest first."""
        weights: list[Any] = [None] * len(self.abstract_weights)
        order = sorted(
            range(len(weights)), key=lambda i: self.abstract_weights[i].size, reverse=True
        )
        for seed, index in enumerate(order):
            spec, kind = self.abstract_weights[index], self._kinds[index]
            weights[index] = _draw(kind, spec.shape, spec.dtype.name, spec.sharding)(seed)
            weights[index].block_until_ready()  # one at a time, so that scratch does not add up
        return weights

    def module(self, weights) -> Transformer:
        """The model with these weights, which are shared and not copied."""
        return nnx.merge(self._graphdef, jax.tree_util.tree_unflatten(self._treedef, weights))

    def logits(self, weights, cache, tokens, attention: str | None):
        """One decode step, to be traced: int32 `[B, 1]` -> (float32 `[B, 1, vocabulary]`, cache).

        Args:
          weights: as `make_weights` returns them.
          cache: a `KVCache`, or one of `decode_caches`.
          tokens: the token chosen last in each row.
          attention: for a cache of plain JAX, the `implementation` of its attention; else None.
        """
        model = self.module(weights)
        return model(tokens, cache) if attention is None else cache.decode(model, tokens, attention)

    def step(self, attention: str | None, compiler_options: dict[str, Any] | None):
        """(weights, cache, tokens int32 `[B, 1]`, finite bool) -> the last three after a step.

        `finite` stays true while all logits of all steps are. Donates all but the weights, so that
        every result lies where its operand lay and a CUDA graph can be replayed as it is.
        `attention` as in `logits`; options of XLA.
        """

        def step(weights, cache, tokens, finite):
            logits, cache = self.logits(weights, cache, tokens, attention)
            chosen = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
            return cache, chosen, finite & jnp.isfinite(logits).all()

        return jax.jit(step, donate_argnums=(1, 2, 3), compiler_options=compiler_options)


def _kind(path: str) -> str:
    return next(kind for kind in ("scale", "embedding", "kernel") if f"'{kind}'" in path)


@functools.lru_cache(maxsize=64)
def _draw(kind: str, shape: tuple[int, ...], dtype: str, sharding):
    """A jitted function of a seed; one for each of the few shapes of a model."""

    def draw(seed):
        if kind == "scale":
            return jnp.ones(shape, dtype)
        # A kernel is [inputs, ...outputs] and keeps the variance of its input.
        width = 0.02 if kind == "embedding" else shape[0] ** -0.5
        return width * jax.random.normal(jax.random.key(seed), shape, dtype)

    return jax.jit(draw, out_shardings=sharding)
