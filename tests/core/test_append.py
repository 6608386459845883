"""What a write changes, bit for bit, and what it leaves alone."""

from __future__ import annotations

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")


def expected_pages(before, table, layout, layer, key, value, lengths, seq_lengths):
    """Pages `[L, P, K, E]` after a write, token by token."""
    tiles = layout.unpack(before.copy())  # [L, P, K, 2, page_size, H]; a view of the copy
    for b, count in enumerate(seq_lengths):
        for t in range(count):
            position = lengths[b] + t
            page, slot = table[b, position // layout.page_size], position % layout.page_size
            tiles[layer, page, :, 0, slot] = key[b, t]
            tiles[layer, page, :, 1, slot] = value[b, t]
    return layout.pack(tiles)


@pytest.mark.parametrize(
    ("placement", "dtype", "head_dim", "page_size", "tokens"),
    [
        ("host", "float32", 64, 16, 1),
        ("device", "bfloat16", 80, 16, 33),
        ("device", "float16", 96, 64, 5),
        ("host", "bfloat16", 128, 64, 33),
        ("device", "float32", 256, 16, 2),
    ],
)
def test_decode_is_attend_then_append(
    implementation, dtype, head_dim, page_size, tokens, placement
):
    capacity = 6 * page_size
    lengths = [0, page_size - 1, page_size, capacity - tokens, capacity]
    seq_lengths = [tokens, tokens, max(1, tokens // 2), tokens, 0]
    built = cache_builder.build(
        lengths, max_length=capacity, head_dim=head_dim, num_layers=3, dtype=dtype,
        page_size=page_size, num_pages=5 * 6 + 3, placement=placement,
    )  # fmt: skip
    cache, layer = built.cache, 1
    query, key, value = cache_builder.tokens(1, 5, tokens, 6, 2, head_dim, dtype, seq_lengths)
    table, before = np.asarray(cache.page_table), cache_builder.all_pages(cache)
    expected = expected_pages(before, table, cache.layout, layer, key, value, lengths, seq_lengths)

    options = {
        "layer": layer,
        "query_seq_lengths": np.int32(seq_lengths),
        "implementation": implementation,
    }
    out, lse = directkv_jax.attend(query, cache, key, value, return_residual=True, **options)
    assert cache_builder.same_bits(cache_builder.all_pages(cache), before), "attend only reads"
    (decoded, decoded_lse), cache = directkv_jax.decode_attention(
        query, key, value, cache, return_residual=True, **options
    )
    assert cache_builder.same_bits(decoded, out)
    assert cache_builder.same_bits(decoded_lse, lse)
    oracle.check(
        out, lse, dtype, query, built.keys[layer], built.values[layer], lengths, key, value,
        seq_lengths=seq_lengths,
    )  # fmt: skip
    assert cache_builder.same_bits(cache_builder.all_pages(cache), expected)
    assert np.asarray(cache.lengths).tolist() == lengths, "lengths change by `advance` only"
    assert not np.asarray(cache.overflowed).any()


def test_append_alone_writes_the_same(implementation):
    built = cache_builder.build([3, 16, 0], max_length=48, num_layers=2)
    cache, lengths, seq_lengths = built.cache, [3, 16, 0], [5, 4, 0]
    _, key, value = cache_builder.tokens(2, 3, 5, 2, 2, 64, "float32", seq_lengths)
    expected = expected_pages(
        cache_builder.all_pages(cache), np.asarray(cache.page_table), cache.layout, 0, key, value,
        lengths, seq_lengths,
    )  # fmt: skip
    cache = directkv_jax.append(
        cache, key, value, query_seq_lengths=np.int32(seq_lengths), implementation=implementation
    )
    assert cache_builder.same_bits(cache_builder.all_pages(cache), expected)


def test_chunks_reach_ragged_lengths(implementation):
    """A cache filled by appends in chunks, ragged in each, holds what one write would have put."""
    rng = np.random.default_rng(0)
    empty = cache_builder.build([0, 0, 0, 0], max_length=80, num_layers=2, dtype="bfloat16")
    cache, held = empty.cache, [[] for _ in range(4)]

    def fill(cache, key, value, n):
        for layer in range(2):
            cache = directkv_jax.append(
                cache, key[layer], value[layer], layer=layer, query_seq_lengths=n,
                implementation=implementation,
            )  # fmt: skip
        return cache.advance(n)

    fill = jax.jit(fill, donate_argnums=0)
    for _ in range(5):
        n = rng.integers(0, 17, 4).astype(np.int32)
        key, value = (cache_builder.random(rng, (2, 4, 16, 2, 64), "bfloat16") for _ in range(2))
        cache = fill(cache, key, value, n)
        for b in range(4):
            held[b].append((key[:, b, : n[b]], value[:, b, : n[b]]))
    for b in range(4):
        keys, values = (np.concatenate(x, axis=1) for x in zip(*held[b], strict=True))
        assert int(cache.lengths[b]) == keys.shape[1]
        for layer in range(2):
            k, v = cache.gather(layer, b, 0, keys.shape[1])
            assert cache_builder.same_bits(k, keys[layer])
            assert cache_builder.same_bits(v, values[layer])
            rest = cache.gather(layer, b, keys.shape[1], cache.max_length)
            assert all(np.isnan(x.astype(np.float32)).all() for x in rest)


def test_steps_equal_one_prompt(implementation):
    """Decoding token by token gives what attending to all tokens at once gives."""
    built = cache_builder.build([0, 0], max_length=48)
    query, key, value = cache_builder.tokens(3, 2, 20, 4, 2, 64, "float32")
    whole = directkv_jax.attend(query, built.cache, key, value, implementation=implementation)
    cache, pieces = built.cache, []
    for t in range(20):
        one = slice(t, t + 1)
        out, cache = directkv_jax.decode_attention(
            query[:, one], key[:, one], value[:, one], cache, implementation=implementation
        )
        cache = cache.advance(1)
        pieces.append(out)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, rtol=0, atol=2e-6)


def test_layer_may_be_traced(implementation):
    built = cache_builder.build([20, 33], max_length=48, num_layers=3)
    query, key, value = cache_builder.tokens(4, 2, 2, 4, 2, 64, "float32")

    @jax.jit
    def at(cache, layer):
        return directkv_jax.attend(
            query, cache, key, value, layer=layer, implementation=implementation
        )

    for layer in range(3):
        oracle.check(
            at(built.cache, jnp.int32(layer)), None, "float32", query, built.keys[layer],
            built.values[layer], [20, 33], key, value,
        )  # fmt: skip
    assert at._cache_size() == 1, "another layer should not compile again"


def test_rows_may_share_pages(implementation):
    """A common prefix held once: both rows read it, each goes on in its own page."""
    built = cache_builder.build([16, 0], max_length=48)
    table = np.asarray(built.cache.page_table).copy()
    table[1, 0] = table[0, 0]
    cache = built.cache.replace(page_table=jnp.asarray(table), lengths=jnp.int32([16, 16]))
    query, key, value = cache_builder.tokens(5, 2, 3, 4, 2, 64, "float32")
    out, cache = directkv_jax.decode_attention(
        query, key, value, cache, implementation=implementation
    )
    keys, values = (np.stack([x[0, 0], x[0, 0]]) for x in (built.keys, built.values))
    oracle.check(out, None, "float32", query, keys, values, [16, 16], key, value)
    cache = cache.advance(3)
    for b in range(2):
        k, _ = cache.gather(0, b, 0, 19)
        assert cache_builder.same_bits(k, np.concatenate([built.keys[0, 0, :16], key[b]]))


def test_residuals_merge_to_the_whole(implementation):
    """lse is the weight with which a partial result enters a larger softmax."""
    built = cache_builder.build([40, 7], max_length=48)
    query, key, value = cache_builder.tokens(6, 2, 1, 4, 2, 64, "float32")
    empty = built.cache.replace(lengths=jnp.int32([0, 0]))
    options = {"return_residual": True, "implementation": implementation}
    whole, whole_lse = directkv_jax.attend(query, built.cache, key, value, **options)
    a, lse_a = directkv_jax.attend(query, built.cache, **options)
    b, lse_b = directkv_jax.attend(query, empty, key, value, **options)
    lse = np.logaddexp(lse_a, lse_b)
    merged = a * np.exp(lse_a - lse)[..., None] + b * np.exp(lse_b - lse)[..., None]
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)
    np.testing.assert_allclose(merged, whole, atol=2e-6)


def test_empty_rows_give_zeros_and_minus_infinity(implementation):
    built = cache_builder.build([0, 5], max_length=48)
    query, _, _ = cache_builder.tokens(7, 2, 2, 4, 2, 64, "float32", [2, 0])
    out, lse = directkv_jax.attend(
        query, built.cache, query_seq_lengths=np.int32([2, 0]), return_residual=True,
        implementation=implementation,
    )  # fmt: skip
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()
