"""Wrong calls: one error of the right type that says what, expected, got and the remedy."""

from __future__ import annotations

import re

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax
from directkv_jax import memory

pytestmark = pytest.mark.usefixtures("strict_numerics")

B, T, N, K, H, L = 2, 3, 4, 2, 64, 2


@pytest.fixture(scope="module")
def cache():
    return cache_builder.build([5, 20], max_length=48, num_kv_heads=K, num_layers=L).cache


def tokens(**change):
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, H)} | change
    return {
        name: x if not isinstance(x, tuple) else np.zeros(x, np.float32)
        for name, x in shapes.items()
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"key": (B, T, 3, H)},
            ValueError,
            "`key` should have shape (B=2, T=3, K=2, H=64), but got (2, 3, 3, 64)",
        ),
        (
            {"value": (B, T, K, 32)},
            ValueError,
            "`value` should have shape (B=2, T=3, K=2, H=64), but got (2, 3, 2, 32)",
        ),
        (
            {"value": (B, 2, K, H)},
            ValueError,
            "`value` should have shape (B=2, T=3, K=2, H=64), but got (2, 2, 2, 64)",
        ),
        (
            {"key": (3, T, K, H)},
            ValueError,
            "`key` should have shape (B=2, T=3, K=2, H=64), but got (3, 3, 2, 64)",
        ),
        (
            {"key": (T, K, H)},
            ValueError,
            "`key` should have shape (B=2, T=3, K=2, H=64), but got (3, 2, 64)",
        ),
        (
            {"query": (T, N, H)},
            ValueError,
            "`query` should have shape (B, T, N, H), but got (3, 4, 64)",
        ),
        (
            {"query": (3, T, N, H)},
            ValueError,
            "`query` should have shape (B=2, T=3, N=4, H=64), but got (3, 3, 4, 64)",
        ),
        (
            {"query": (B, T, N, 32)},
            ValueError,
            "`query` should have shape (B=2, T=3, N=4, H=64), but got (2, 3, 4, 32)",
        ),
        (
            {"query": (B, T, 3, H)},
            ValueError,
            "`query` should have a multiple of K=2 heads, but got N=3",
        ),
        (
            {"query": (B, T, 0, H)},
            ValueError,
            "`query` should have a multiple of K=2 heads, but got N=0",
        ),
        ({"query": None}, ValueError, "`query` should have shape (B, T, N, H), but got NoneType"),
        ({"key": None}, TypeError, "`key` and `value` are required; use `attend` to read only"),
        ({"key": [1.0]}, TypeError, "`key` should be an array, but got list"),
        (
            {"query": np.zeros((B, T, N, H), np.float16)},
            TypeError,
            (
                "`query` should have the dtype of the cache, float32, but got float16. Cast "
                "it, or create the cache with dtype=float16"
            ),
        ),
        (
            {"value": np.zeros((B, T, K, H), jnp.bfloat16)},
            TypeError,
            "`value` should have the dtype of the cache, float32, but got bfloat16. Cast it",
        ),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_wrong_tokens(cache, change, error, message, jitted):
    arguments = tokens(**change)
    decode = directkv_jax.decode_attention
    if jitted and all(isinstance(x, np.ndarray) for x in arguments.values()):
        decode = jax.jit(decode)
    with pytest.raises(error, match=re.escape(message)):
        decode(**arguments, cache=cache)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layer": L}, ValueError, "`layer` should be in [0, L=2), but got 2"),
        ({"layer": -1}, ValueError, "`layer` should be in [0, L=2), but got -1"),
        (
            {"layer": 0.5},
            TypeError,
            "`layer` should be an int or an integer scalar array, but got 0.5",
        ),
        (
            {"layer": np.zeros(2, np.int32)},
            TypeError,
            "`layer` should be an int or an integer scalar",
        ),
        (
            {"query_seq_lengths": np.float32([1, 1])},
            TypeError,
            "`query_seq_lengths` should hold integers, but has dtype float32",
        ),
        (
            {"query_seq_lengths": np.int32([1, 1, 1])},
            ValueError,
            "`query_seq_lengths` should have shape (B=2,), but got (3,)",
        ),
        (
            {"query_seq_lengths": np.int32([1, 4])},
            ValueError,
            "`query_seq_lengths` should be in [0, T=3], but got [1, 4]",
        ),
        (
            {"query_seq_lengths": -1},
            ValueError,
            "`query_seq_lengths` should be in [0, T=3], but got [-1, -1]",
        ),
        (
            {"logits_soft_cap": 0.0},
            ValueError,
            "`logits_soft_cap` should be positive or None, but got 0.0",
        ),
        (
            {"logits_soft_cap": -3.0},
            ValueError,
            "`logits_soft_cap` should be positive or None, but got -3.0",
        ),
        (
            {"logits_soft_cap": float("inf")},
            ValueError,
            "`logits_soft_cap` should be positive or None, but got inf",
        ),
        ({"logits_soft_cap": 1e300}, ValueError, "`logits_soft_cap` should be positive or None"),
        ({"scale": float("inf")}, ValueError, "`scale` should be finite, but got inf"),
        ({"scale": 1e300}, ValueError, "`scale` should be finite, but got 1e+300"),
        ({"layer": np.array(5)}, ValueError, "`layer` should be in [0, L=2), but got 5"),
        ({"layer": jnp.int32(-1)}, ValueError, "`layer` should be in [0, L=2), but got -1"),
        ({"query_seq_lengths": 1 << 40}, ValueError, "`query_seq_lengths` should hold int32"),
        ({"local_window_size": -1}, ValueError, "sliding_window=W is (W - 1, 0)"),
        ({"num_ctas": 0}, ValueError, "`num_ctas` should be from 1 to 65536 or None"),
        ({"num_ctas": 1.5}, TypeError, "`num_ctas` should be an int or None"),
        ({"num_ctas": True}, TypeError, "`num_ctas` should be an int or None"),
        (
            {"local_window_size": (3, -1)},
            ValueError,
            "`local_window_size` should be a non-negative int or a pair (left, right)",
        ),
        (
            {"local_window_size": (1, 2, 3)},
            ValueError,
            "`local_window_size` should be a non-negative int or a pair",
        ),
        (
            {"local_window_size": 2.5},
            TypeError,
            "`local_window_size` should be a non-negative int or a pair",
        ),
        (
            {"sinks": np.zeros(N)},
            NotImplementedError,
            "`sinks` is reserved and not supported yet; pass None",
        ),
        (
            {"implementation": "tpu"},
            ValueError,
            ("`implementation` should be None or one of cuda, cpu, xla, reference, but got 'tpu'"),
        ),
    ],
)
def test_wrong_options(cache, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        directkv_jax.decode_attention(**tokens(), cache=cache, **options)
    with pytest.raises(error, match=re.escape(message)):
        directkv_jax.attend(tokens()["query"], cache, **options)


def test_attend_takes_key_and_value_together(cache):
    with pytest.raises(TypeError, match="`key` and `value` should be given both or neither"):
        directkv_jax.attend(tokens()["query"], cache, tokens()["key"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch": 0}, ValueError, "`batch` should be a positive int, but got 0"),
        ({"max_length": -5}, ValueError, "`max_length` should be a positive int, but got -5"),
        ({"max_length": 4.5}, ValueError, "`max_length` should be a positive int, but got 4.5"),
        ({"max_length": 1 << 40}, ValueError, "`max_length` should be at most 1073741824, but got"),
        ({"num_layers": True}, ValueError, "`num_layers` should be a positive int, but got True"),
        ({"num_pages": 0}, ValueError, "`num_pages` should be a positive int, but got 0"),
        ({"num_kv_heads": 0}, ValueError, "`num_kv_heads` should be a positive int, but got 0"),
        (
            {"head_dim": 12},
            ValueError,
            "`head_dim` should be a multiple of 8 from 8 to 512, but got 12",
        ),
        (
            {"head_dim": 520},
            ValueError,
            "`head_dim` should be a multiple of 8 from 8 to 512, but got 520",
        ),
        (
            {"page_size": 24},
            ValueError,
            "`page_size` should be a multiple of 16 from 16 to 4096, but got 24",
        ),
        (
            {"page_size": 0},
            ValueError,
            "`page_size` should be a multiple of 16 from 16 to 4096, but got 0",
        ),
        (
            {"page_size": 8192},
            ValueError,
            "`page_size` should be a multiple of 16 from 16 to 4096, but got 8192",
        ),
        (
            {"dtype": jnp.int8},
            TypeError,
            "`dtype` should be one of bfloat16, float16, float32, but got int8",
        ),
        (
            {"dtype": jnp.float64},
            TypeError,
            "`dtype` should be one of bfloat16, float16, float32, but got float64",
        ),
        (
            {"placement": "disk"},
            ValueError,
            '`placement` should be "host" or "device", but got \'disk\'',
        ),
    ],
)
def test_wrong_sizes(options, error, message):
    sizes = {"batch": 1, "max_length": 64, "num_kv_heads": 2, "head_dim": 64} | options
    with pytest.raises(error, match=re.escape(message)):
        directkv_jax.KVCache.create(**sizes)


def test_a_cache_in_the_wrong_memory_is_refused_with_the_remedy(cache):
    """What Flax's `eval_shape(init)` and `jnp.zeros` make of a host cache."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda c: c, cache))
    for call in (
        lambda: directkv_jax.decode_attention(**tokens(), cache=zeros),
        lambda: directkv_jax.attend(tokens()["query"], zeros),
        lambda: directkv_jax.append(zeros, tokens()["key"], tokens()["value"]),
        lambda: zeros.fork(np.int32([0, 1])),
        lambda: jax.jit(lambda c: directkv_jax.attend(tokens()["query"], c))(zeros),
    ):
        with pytest.raises(ValueError, match=r'placement "host".*KVCache.create.*memory.retype'):
            call()


def test_a_cache_that_lost_its_type_gets_it_back(cache):
    shard = cache.pages.addressable_shards[0].data
    again = cache.replace(pages=memory.retype(shard))
    assert memory.base_pointers(again.pages) == memory.base_pointers(cache.pages)
    assert jax.typeof(again.pages).memory_space == jax.memory.Space.Host
    directkv_jax.attend(tokens()["query"], again)
    with pytest.raises(
        ValueError, match=r'`array` .* "pinned_host", but is in "device".*device_put'
    ):
        memory.retype(jnp.zeros(3))


def test_a_deleted_cache_is_refused():
    cache = directkv_jax.KVCache.create(1, 16, num_kv_heads=1, head_dim=64)
    cache.delete()
    assert "lengths=?" in repr(cache)
    with pytest.raises(ValueError, match="already donated to an earlier call, or deleted"):
        cache.advance(1)
    with pytest.raises(ValueError, match="already donated to an earlier call, or deleted"):
        cache.gather(0, 0, 0, 1)


def test_a_prompt_longer_than_the_cache():
    cache = directkv_jax.KVCache.create(
        1, 40, num_kv_heads=K, head_dim=H, dtype=jnp.float32, page_size=16
    )
    new = np.zeros((1, 49, K, H), np.float32)
    with pytest.raises(ValueError, match=r"Row 0 holds 0 tokens and 49 more .* 48 .* max_length"):
        directkv_jax.append(cache, new, new)
    assert np.asarray(cache.lengths).tolist() == [0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda c: c.advance(29),
            ValueError,
            "A row would hold 49 tokens, but the cache has room for 48 per row",
        ),
        (lambda c: c.advance(2**31 - 1), ValueError, "the cache has room for 48 per row"),
        (lambda c: c.advance(-1), ValueError, "`n` should not be negative, but got [-1, -1]"),
        (lambda c: c.advance(1.5), TypeError, "`n` should hold integers"),
        (
            lambda c: c.advance(np.int32([1, 2, 3])),
            ValueError,
            "`n` should have shape (B=2,), but got (3,)",
        ),
        (
            lambda c: c.truncate(np.int32([5, 21])),
            ValueError,
            "`lengths` should be in [0, present lengths [5, 20]], but got [5, 21]",
        ),
        (lambda c: c.truncate(-1), ValueError, "`lengths` should be in [0, present lengths"),
        (
            lambda c: c.take_rows(np.int32([0, 0])),
            ValueError,
            (
                "`rows` should not repeat, but got [0, 0]: two rows would write the same "
                "page. Use `fork`"
            ),
        ),
        (
            lambda c: c.take_rows(np.int32([2])),
            ValueError,
            "`rows` should be in [0, B=2), but got [2]",
        ),
        # What its lower 32 bits would be is in range.
        *(
            (call, ValueError, "should hold int32, but got")
            for call in (
                lambda c: c.take_rows(np.array([1 << 32])),
                lambda c: c.fork(np.array([1 << 32])),
                lambda c: c.advance((1 << 32) + 3),
                lambda c: c.advance(1 << 40),
                lambda c: c.advance([1 << 70, 0]),
                lambda c: c.truncate(np.uint64([1 << 32, 0])),
                lambda c: c.truncate(-(1 << 40)),
            )
        ),
        (
            lambda c: c.fork(np.int32([-1])),
            ValueError,
            "`rows` should be in [0, B=2), but got [-1]",
        ),
        (
            lambda c: c.fork(np.float32([0])),
            TypeError,
            "`rows` should hold integers, but has dtype float32",
        ),
        (
            lambda c: c.fork(np.int32(0)),
            TypeError,
            "`rows` should be an array of one dimension, but got ()",
        ),
        (
            lambda c: c.reset(np.int32([0])),
            TypeError,
            "`rows` should be a bool mask of shape (B=2,), but got int32 (1,)",
        ),
        (
            lambda c: c.gather(0, 0, 0, 49),
            ValueError,
            (
                "`gather` takes layer < L=2, row < B=2 and 0 <= start <= stop <= 48, but "
                "got layer=0, row=0, [0, 49)"
            ),
        ),
        (lambda c: c.gather(2, 0, 0, 1), ValueError, "`gather` takes layer < L=2"),
        (lambda c: c.gather(0, -1, 0, 1), ValueError, "`gather` takes layer < L=2, row < B=2"),
        (
            lambda c: jax.jit(lambda c: c.gather(0, 0, 0, 1))(c),
            ValueError,
            "`gather` is for debugging and cannot be traced; call it outside jit",
        ),
        (
            lambda c: c.replace(overflowed=jnp.array([True, False])).fork(np.int32([1, 0])),
            ValueError,
            "Rows [1] of `rows` have overflowed and cannot be forked",
        ),
    ],
)
def test_wrong_row_operations(cache, call, error, message):
    before = cache_builder.all_pages(cache)
    with pytest.raises(error, match=re.escape(message)):
        call(cache)
    assert cache_builder.same_bits(cache_builder.all_pages(cache), before)


def test_what_int32_cannot_hold_is_out_of_range_under_jit(cache):
    lengths = np.asarray(cache.lengths)
    with jax.enable_x64(True):
        for wrong in ((1 << 32) + 1, -(1 << 40)):
            for change in (type(cache).advance, type(cache).truncate):
                changed = jax.jit(change)(cache, jnp.int64(wrong))
                assert np.asarray(changed.overflowed).all()
                assert np.asarray(changed.lengths).tolist() == lengths.tolist()


def test_a_cache_that_is_none():
    new = np.zeros((1, 1, 2, 64), np.float32)
    for call in (
        lambda: directkv_jax.append(None, new, new),
        lambda: directkv_jax.attend(new, 5),
        lambda: directkv_jax.decode_attention(new, new, new, new),
        lambda: directkv_jax.qkv_attention(np.zeros((1, 1, 64)), None, None),
    ):
        with pytest.raises(TypeError, match="`cache` should be a KVCache, but got"):
            call()


def test_a_projection_and_a_rope_that_are_none(cache):
    x = np.zeros((2, 1, 64), np.float32)
    with pytest.raises(TypeError, match="`projection` should be a QKVProjection, but got None"):
        directkv_jax.qkv_attention(x, None, cache)
    kernel = np.zeros((64, cache.num_kv_heads, 3, cache.head_dim), np.float32)
    with pytest.raises(TypeError, match="`rope` should be a RoPE or None, but got str"):
        directkv_jax.qkv_attention(x, directkv_jax.QKVProjection(kernel), cache, rope="default")


def test_no_gpu():
    if directkv_jax.is_supported("cuda"):
        pytest.skip("there is a GPU here")
    cache = directkv_jax.KVCache.create(1, 64, num_kv_heads=2, head_dim=64)
    new = np.zeros((1, 1, 2, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r'implementation="cuda" cannot .* CUDA'):
        directkv_jax.decode_attention(new, new, new, cache, implementation="cuda")
