"""The cache of a whole model: layers of several kinds, and windows that are all that is kept."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from windowed import CONFIG, GLOBAL

import directkv_jax
from directkv_jax import models
from directkv_jax.models.config import Part
from directkv_jax.models.reading import PromptReader

LENGTHS = np.int32([150, 31])


@pytest.fixture(scope="module")
def model():
    return models.Transformer(CONFIG, rngs=nnx.Rngs(0))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def step(graphdef, params, tokens, cache, valid):
    return nnx.merge(graphdef, params)(tokens, cache, valid)


def keeps_all(cache, batch, max_length):
    """The same parts without their windows."""
    return models.ModelCache(
        tuple(
            directkv_jax.KVCache.create(
                batch, max_length, num_kv_heads=part.num_kv_heads, head_dim=part.head_dim,
                num_layers=part.num_layers, dtype=jnp.float32, page_size=16,
            )
            for part in cache.parts
        )
    )  # fmt: skip


def test_layers_are_sorted_into_parts():
    assert CONFIG.parts == (Part(2, 32, 20, 2), Part(2, 32, None, 1), Part(1, 64, 20, 1))
    assert CONFIG.places == ((0, 0), (1, 0), (2, 0), (0, 1))


def test_windows_are_kept_on_the_device_and_the_rest_on_the_host(model):
    cache = model.create_cache(2, 1000, page_size=16)
    assert [part.placement for part in cache.parts] == ["device", "host", "device"]
    assert [part.kept_length for part in cache.parts] == [32, 1008, 32]
    assert cache.host_bytes == 2 * 1008 * 2 * 2 * 32 * 4
    assert cache.device_bytes == 2 * 32 * (2 * 2 * 2 * 32 + 2 * 1 * 64) * 4
    assert cache.num_layers == 4
    cache.delete()
    assert cache.is_deleted()
    moved = model.create_cache(1, 64, page_size=16, placement="device", window_placement="host")
    assert [part.placement for part in moved.parts] == ["host", "device", "host"]


def results(model, cache, chunks):
    """(lengths, logits) after a prompt, single steps and rollbacks. Deletes the cache."""
    graphdef, params = nnx.split(model)
    tokens = np.zeros((2, sum(chunks)), np.int32)
    tokens[:, :150] = np.random.default_rng(0).integers(0, 80, (2, 150))
    last, cache = PromptReader(model).read(jnp.asarray(tokens), LENGTHS, chunks, cache)
    logits = [model.logits(last)]
    for valid in (np.int32([1, 1]), np.int32([3, 2]), np.int32([3, 0])):
        new, cache = step(graphdef, params, tokens[:, :3], cache, valid)
        logits += [new[b, :n] for b, n in enumerate(valid)]
        cache = cache.truncate(cache.lengths - jnp.minimum(valid, 2))
    assert not cache.overflowed.any()
    lengths = cache.lengths.tolist()
    cache.delete()
    return lengths, [np.asarray(array) for array in logits]


@pytest.fixture(scope="module")
def with_all_tokens(model):
    cache = model.create_cache(2, 200, page_size=16)
    return results(model, keeps_all(cache, 2, 200), (160,))


@pytest.mark.parametrize("chunks", [(160,), (40,) * 4, (7,) * 22])
def test_a_prompt_and_steps_are_as_with_all_tokens(model, with_all_tokens, chunks):
    """Chunks longer than a ring, and shorter; then single steps and a rollback."""
    cache = model.create_cache(2, 200, page_size=16, rollback=3)
    lengths, logits = results(model, cache, chunks)
    assert lengths == with_all_tokens[0]
    for got, expected in zip(logits, with_all_tokens[1], strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_prompt_goes_on_from_what_is_cached(model, with_all_tokens):
    """In two reads, with rows of other lengths each time."""
    tokens = np.zeros((2, 160), np.int32)
    tokens[:, :150] = np.random.default_rng(0).integers(0, 80, (2, 150))
    reader, cache = PromptReader(model), model.create_cache(2, 200, page_size=16, rollback=3)
    first = np.int32([100, 3])
    _, cache = reader.read(jnp.asarray(tokens[:, :120]), first, (40,) * 3, cache)
    rest = np.stack([np.roll(row, -n)[:80] for row, n in zip(tokens, first, strict=True)])
    last, cache = reader.read(jnp.asarray(rest), LENGTHS - first, (40, 40), cache, continues=True)
    assert cache.lengths.tolist() == LENGTHS.tolist()
    expected = with_all_tokens[1][0]
    np.testing.assert_allclose(model.logits(last), expected, rtol=0, atol=1e-5)


def test_a_window_no_shorter_than_a_row_is_none(model):
    cache = model.create_cache(1, 32, page_size=16)
    assert [(part.window, part.placement) for part in cache.parts] == [(None, "host")] * 3


def test_a_row_that_overflows_stops_in_every_part(model):
    graphdef, params = nnx.split(model)
    cache = model.create_cache(2, 200, page_size=16, rollback=3).advance(np.int32([207, 3]))
    tokens = np.zeros((2, 3), np.int32)
    _, cache = step(graphdef, params, tokens, cache, np.int32([2, 2]))
    assert cache.overflowed.tolist() == [True, False]
    assert [part.lengths.tolist() for part in cache.parts] == [[207, 5]] * 3
    cache = cache.reset(jnp.array([True, False])).take_rows(jnp.int32([1, 0]))
    assert [part.lengths.tolist() for part in cache.parts] == [[5, 0]] * 3


def test_a_lone_kv_cache_serves_layers_that_are_alike_only(model):
    lone = directkv_jax.KVCache.create(1, 32, num_kv_heads=2, head_dim=32, num_layers=4)
    with pytest.raises(ValueError, match=r"of several kinds.*model\.create_cache"):
        model(np.zeros((1, 1), np.int32), lone)
    alike = models.Transformer(dataclasses.replace(CONFIG, layers=(GLOBAL,)), rngs=nnx.Rngs(0))
    lone = directkv_jax.KVCache.create(
        1, 32, num_kv_heads=2, head_dim=32, num_layers=1, dtype=jnp.float32
    )
    logits, _ = step(*nnx.split(alike), np.zeros((1, 1), np.int32), lone, np.int32([1]))
    assert logits.shape == (1, 1, 80)
