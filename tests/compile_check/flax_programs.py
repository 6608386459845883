"""Flax programs: the decode step of the real model, and the drop-ins of nnx and linen."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import directkv_jax
import directkv_jax.linen
import directkv_jax.nnx
from compile_check import target
from compile_check.programs import BATCH, LAYERS, MAX_LENGTH, Program
from directkv_jax import models
from directkv_jax.models import decoding, graph, lookup, reading, sampling
from directkv_jax.models.prefill import prompt_attention

FEATURES, HEADS, KV_HEADS = 4096, 32, 8

# Llama 3 8B, four of its 32 layers: all layers are compiled alike.
LLAMA = models.ModelConfig.from_dict({
    "model_type": "llama", "vocab_size": 128256, "hidden_size": FEATURES,
    "intermediate_size": 14336, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "rope_theta": 500000.0,
})  # fmt: skip


WINDOWS = dataclasses.replace(
    LLAMA,
    layers=tuple(
        dataclasses.replace(layer, window=None if i % 2 else 4096)
        for i, layer in enumerate(LLAMA.layers)
    ),
)


def flax_programs() -> list[Program]:
    """Programs over `directkv_jax.models`, `directkv_jax.nnx` and `directkv_jax.linen`."""
    return [
        Program("Llama: decode step", _model_step),
        Program(
            "every other layer with a window: decode step",
            functools.partial(_model_step, WINDOWS),
        ),
        Program("Llama: decode step with drafts and penalty", _model_drafting_step),
        Program("Llama: decode step, nnx.jit", _model_nnx_jit),
        Program("Llama: while_loop of decode steps", _model_loop),
        Program(
            "Llama: prefill of one layer", functools.partial(_model_layer, prompt_attention, 2048)
        ),
        Program(
            "Llama: a later chunk of one layer",
            functools.partial(_model_layer, directkv_jax.qkv_attention, 64),
        ),
        Program("Llama: prefill of all layers", _model_prefill),
        Program("nnx: held cache, jax.jit", functools.partial(_nnx_held, jax.jit)),
        Program("nnx: held cache, nnx.jit", functools.partial(_nnx_held, nnx.jit)),
        Program("nnx: nnx.scan over layers", _nnx_scan),
        Program("linen: apply", _linen_apply),
        Program("linen: nn.scan over layers", _linen_scan),
        Program(
            "control: nnx model not split, not donated",
            functools.partial(_nnx_held, nnx.jit, donate=()),
            copies=True,
        ),
    ]


# The model


def _model(mesh, config=LLAMA):
    """(abstract model, abstract cache)."""
    model = nnx.eval_shape(lambda: models.Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    with target.tracing_for_cuda():
        cache = jax.eval_shape(lambda: model.create_cache(BATCH, MAX_LENGTH))
    return nnx.merge(graphdef, target.on_device(mesh, params)), target.place(mesh, cache)


def _state(mesh):
    def make():
        zeros = jnp.zeros((BATCH,), jnp.int32)
        return decoding.DecodeState(
            tokens=zeros, keys=sampling.row_keys(0, BATCH), count=zeros, done=zeros > 0,
            limit=jnp.int32(64), stop_tokens=jnp.zeros((4,), jnp.int32),
        )  # fmt: skip

    return target.on_device(mesh, jax.eval_shape(make))


_OPTIONS = {"sampling": sampling.Sampling(temperature=0.7, top_k=50), "implementation": None}


def _on_host(cache: models.ModelCache) -> directkv_jax.KVCache:
    (part,) = (part for part in cache.parts if part.placement == "host")
    return part


def _model_step(config=LLAMA):
    mesh = target.h200()
    model, cache = _model(mesh, config)
    with target.tracing_for_cuda():
        step = decoding._step.lower(*graph.split(model), cache, _state(mesh), **_OPTIONS)
    return step, _on_host(cache)


def _model_drafting_step():
    mesh = target.h200()
    model, cache = _model(mesh)
    tokens = target.array(mesh, (BATCH, MAX_LENGTH + 1), jnp.int32)
    history = lookup.History(tokens, target.array(mesh, (BATCH,), jnp.int32))
    seen = target.array(mesh, (BATCH, LLAMA.vocab_size), jnp.bool_)
    state = dataclasses.replace(_state(mesh), seen=seen, history=history)
    options = {"sampling": sampling.Sampling(repetition_penalty=1.2), "implementation": None}
    with target.tracing_for_cuda():
        step = decoding._step.lower(*graph.split(model), cache, state, speculate=4, **options)
    return step, _on_host(cache)


def _model_loop():
    mesh = target.h200()
    model, cache = _model(mesh)
    with target.tracing_for_cuda():
        loop = decoding._loop.lower(*graph.split(model), cache, _state(mesh), steps=64, **_OPTIONS)
    return loop, _on_host(cache)


def _model_nnx_jit():
    mesh = target.h200()
    model, cache = _model(mesh)
    tokens = target.array(mesh, (BATCH, 1), jnp.int32)

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(cache, model, tokens):
        logits, cache = model(tokens, cache)
        return cache, logits

    with target.tracing_for_cuda():
        return step.lower(cache, model, tokens), _on_host(cache)


def _model_layer(attend, tokens):
    mesh = target.h200()
    model, cache = _model(mesh)
    x = target.array(mesh, (BATCH, tokens, FEATURES))
    lengths, index = target.array(mesh, (BATCH,), jnp.int32), target.array(mesh, (), jnp.int32)
    with target.tracing_for_cuda():
        lowered = reading._prefill_layer.lower(
            *graph.split(model.layers[1]), x, cache, index, lengths, attend=attend,
            implementation=None,
        )  # fmt: skip
    return lowered, _on_host(cache)


def _model_prefill():
    mesh = target.h200()
    model, cache = _model(mesh, dataclasses.replace(LLAMA, layers=LLAMA.layers[:2]))
    graphdef, params = nnx.split(model)
    tokens = target.array(mesh, (BATCH, 512), jnp.int32)
    lengths = target.array(mesh, (BATCH,), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def prefill(cache, params, tokens, lengths):
        logits, cache = nnx.merge(graphdef, params).prefill(tokens, cache, lengths)
        return cache, logits

    with target.tracing_for_cuda():
        return prefill.lower(cache, params, tokens, lengths), _on_host(cache)


# The drop-ins

_WIDE = {"in_features": FEATURES, "num_heads": HEADS, "dtype": jnp.bfloat16}


def _is_cache(x) -> bool:
    return isinstance(x, directkv_jax.KVCache)


def _place(mesh, tree):
    """Every KVCache of an abstract tree in its place; returns (tree, the only cache)."""
    tree = jax.tree.map(
        lambda x: target.place(mesh, x) if _is_cache(x) else x, tree, is_leaf=_is_cache
    )
    (cache,) = (x for x in jax.tree.leaves(tree, is_leaf=_is_cache) if _is_cache(x))
    return tree, cache


def _nnx_held(jit, donate=0):
    """A module that holds its own cache: split off and donated, as the documentation says."""
    mesh = target.h200()

    def make():
        attention = directkv_jax.nnx.MultiHeadAttention(
            **_WIDE, param_dtype=jnp.bfloat16, decode=True, rngs=nnx.Rngs(0)
        )
        attention.init_cache((BATCH, MAX_LENGTH, FEATURES), dtype=jnp.bfloat16)
        return attention

    with target.tracing_for_cuda():
        graphdef, cache, rest = nnx.split(nnx.eval_shape(make), nnx.Cache, ...)
        cache, held = _place(mesh, cache)

        @functools.partial(jit, donate_argnums=donate)
        def step(cache, rest, x):
            model = nnx.merge(graphdef, cache, rest)
            y = model(x)
            return nnx.state(model, nnx.Cache), y

        x = target.array(mesh, (BATCH, 1, FEATURES))
        return step.lower(cache, target.on_device(mesh, rest), x), held


def _nnx_scan():
    mesh = target.h200()

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return directkv_jax.nnx.MultiHeadAttention(
            **_WIDE, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(key)
        )

    with target.tracing_for_cuda():
        stack = nnx.eval_shape(lambda: make(jax.random.split(jax.random.key(0), LAYERS)))
        graphdef, params = nnx.split(stack)
        cache = target.empty_cache(
            mesh,
            BATCH,
            MAX_LENGTH,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=FEATURES // HEADS,
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def step(cache, params, x):
            @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
            def layers(carry, attention, layer):
                x, cache = carry
                y, cache = attention(x, cache=cache, layer=layer)
                return x + y, cache

            stack = nnx.merge(graphdef, params)
            x, cache = layers((x, cache), stack, jnp.arange(LAYERS))
            return cache.advance(1), x

        x = target.array(mesh, (BATCH, 1, FEATURES))
        return step.lower(cache, target.on_device(mesh, params), x), cache


def _linen_module(**options):
    return directkv_jax.linen.MultiHeadDotProductAttention(
        num_heads=HEADS, num_kv_heads=KV_HEADS, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
        **options,
    )  # fmt: skip


def _linen_apply():
    mesh = target.h200()
    module = _linen_module(decode=True)
    with target.tracing_for_cuda():
        longest = jax.ShapeDtypeStruct((BATCH, MAX_LENGTH, FEATURES), jnp.bfloat16)
        variables = jax.eval_shape(module.init, jax.random.key(0), longest)
        cache, held = _place(mesh, variables["cache"])

        @functools.partial(jax.jit, donate_argnums=0)
        def step(cache, params, x):
            y, state = module.apply({"params": params, "cache": cache}, x, mutable=["cache"])
            return state["cache"], y

        x = target.array(mesh, (BATCH, 1, FEATURES))
        return step.lower(cache, target.on_device(mesh, variables["params"]), x), held


class _Block(nn.Module):
    @nn.compact
    def __call__(self, carry, layer):
        x, cache = carry
        y, cache = _linen_module()(x, cache=cache, layer=layer)
        return (x + y, cache), None


def _linen_scan():
    mesh = target.h200()
    layers = nn.scan(
        _Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
        check_constancy_invariants=False,  # that check traces the carry without its memory space
    )()  # fmt: skip
    with target.tracing_for_cuda():
        cache = target.empty_cache(
            mesh, BATCH, MAX_LENGTH, num_layers=LAYERS, num_kv_heads=KV_HEADS,
            head_dim=FEATURES // HEADS,
        )  # fmt: skip
        x = target.array(mesh, (BATCH, 1, FEATURES))
        variables = jax.eval_shape(layers.init, jax.random.key(0), (x, cache), jnp.arange(LAYERS))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(cache, params, x):
            (x, cache), _ = layers.apply({"params": params}, (x, cache), jnp.arange(LAYERS))
            return cache.advance(1), x

        return step.lower(cache, target.on_device(mesh, variables["params"]), x), cache
