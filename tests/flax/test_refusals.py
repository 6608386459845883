"""What decoding cannot honour is refused by name; nothing is ignored, and the cache survives."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import directkv_jax.linen
import directkv_jax.nnx

MASK = jnp.ones((2, 1, 1, 1), bool)
MODULE = [  # options of the module, of the call, and what the message names
    ({}, {"mask": MASK}, "`mask` is not supported"),
    ({}, {"sow_weights": True}, "`sow_weights` is not supported"),
    ({"dropout_rate": 0.1, "deterministic": False}, {}, "`dropout_rate` .* dropout is active"),
    ({"dropout_rate": 0.1}, {"deterministic": False}, "`dropout_rate` .* dropout is active"),
]


def nnx_module(**options):
    module = directkv_jax.nnx.MultiHeadAttention(
        4, 256, decode=True, page_size=16, rngs=nnx.Rngs(0), **options
    )
    module.init_cache((2, 16, 256))
    return module


@pytest.mark.parametrize(("options", "call", "message"), MODULE)
def test_nnx_refuses(options, call, message, tokens):
    module = nnx_module(**options)
    with pytest.raises(NotImplementedError, match=message):
        module(tokens(1), **call)
    module(tokens(1), **({"deterministic": True} if options else {}))
    assert module.kv_cache.get_value().lengths.tolist() == [1, 1]


def test_nnx_refuses_a_custom_attention(tokens):
    biased = functools.partial(nnx.dot_product_attention, bias=jnp.ones((1, 4, 1, 1)))
    with pytest.raises(NotImplementedError, match=r"`attention_fn` is not supported.*a bias"):
        nnx_module(attention_fn=biased)(tokens(1))
    with pytest.raises(NotImplementedError, match="`input_positions` is not supported"):
        nnx_module()(tokens(1), input_positions=jnp.zeros((2, 1), int))


@pytest.mark.parametrize(("options", "call", "message"), MODULE)
def test_linen_refuses(options, call, message, tokens):
    module = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True, **options)
    plain = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = plain.init(jax.random.key(0), tokens(16))
    with pytest.raises(NotImplementedError, match=message):
        module.apply(variables, tokens(1), mutable=["cache"], **call)
    assert variables["cache"]["kv_cache"].lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    "option",
    [
        {"attention_fn": functools.partial(nn.dot_product_attention, bias=MASK)},
        {"qk_attn_weights_einsum_cls": lambda: jnp.einsum},
        {"attn_weights_value_einsum_cls": lambda: jnp.einsum},
    ],
    ids=lambda option: next(iter(option)),
)
def test_linen_refuses_custom_maths(option, tokens):
    module = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True, **option)
    with pytest.raises(NotImplementedError, match=f"`{next(iter(option))}` is not supported"):
        jax.eval_shape(module.init, jax.random.key(0), tokens(16))


def test_arguments_of_decoding_need_decoding(tokens, stacked_cache):
    module = directkv_jax.nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(0))
    linen = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4)
    lengths = jnp.ones(2, int)
    with pytest.raises(ValueError, match=r"`query_seq_lengths` .* decode=False\. Set decode=True"):
        module(tokens(1), query_seq_lengths=lengths)
    with pytest.raises(ValueError, match=r"`cache` .* decode=False"):
        module(tokens(1), cache=stacked_cache(1), decode=False)
    with pytest.raises(ValueError, match=r"`query_seq_lengths` .* decode=False"):
        linen.init(jax.random.key(0), tokens(1), query_seq_lengths=lengths)


def test_nnx_without_a_cache_names_the_remedy(tokens):
    module = directkv_jax.nnx.MultiHeadAttention(4, 256, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has no cache\. Make the cache with `init_cache`"):
        module(tokens(1))
    with pytest.raises(TypeError, match="`max_length` should be given too"):
        nnx.view(module, batch_size=2)
    with pytest.raises(TypeError, match="`cache` should be a KVCache, but got dict"):
        module(tokens(1), cache={})
    with pytest.raises(ValueError, match="`cache_placement` should be"):
        directkv_jax.nnx.MultiHeadAttention(4, 256, cache_placement="disk", rngs=nnx.Rngs(0))


def test_linen_with_an_immutable_cache_keeps_it(tokens):
    module = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = module.init(jax.random.key(0), tokens(16))
    with pytest.raises(ValueError, match=r'should be mutable .* mutable=\["cache"\]'):
        module.apply(variables, tokens(1))
    assert not variables["cache"]["kv_cache"].pages.is_deleted()


def test_a_donated_cache_is_refused(tokens):
    module = nnx_module()
    old = module.kv_cache.get_value()
    y = module(tokens(1))
    new = module.kv_cache.get_value()
    module.kv_cache.set_value(old)
    with pytest.raises(
        ValueError, match=r"already donated .* Use the cache that the call returned"
    ):
        module(tokens(1))
    module.kv_cache.set_value(new)
    assert module(tokens(1)).shape == y.shape

    linen = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, decode=True)
    variables = linen.init(jax.random.key(0), tokens(16))
    linen.apply(variables, tokens(1), mutable=["cache"])
    with pytest.raises(
        ValueError, match=r"already donated .* Use the cache that the call returned"
    ):
        linen.apply(variables, tokens(1), mutable=["cache"])


def test_wrong_shapes_and_dtypes_are_refused(tokens):
    module = nnx_module()
    with pytest.raises(ValueError, match=r"should have shape .*B=2.* but got"):
        module(tokens(1, (3,)))
    with pytest.raises(ValueError, match="`inputs_q` should have in_features=256"):
        module(jnp.zeros((2, 1, 32)))
    with pytest.raises(ValueError, match="`inputs_k` should be given"):
        module(tokens(1), None, tokens(1))
    module.init_cache((2, 16, 256), dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="dtype of the cache, bfloat16, but got float32"):
        module(tokens(1))
    uneven = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="multiple of num_kv_heads=3"):
        uneven.init(jax.random.key(0), tokens(1))


def test_gradients_through_decoding_name_training(tokens):
    module = nnx_module()
    with pytest.raises(NotImplementedError, match=r"inference path.* decode=False"):
        jax.grad(lambda x: module(x).sum())(tokens(1))
    np.testing.assert_array_equal(module.kv_cache.get_value().lengths, [0, 0])
