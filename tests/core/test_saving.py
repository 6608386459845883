"""Caches in files: what the rows hold comes back, whatever pages it lay in."""

from __future__ import annotations

import json
import re

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged import described, rewritten
from safetensors import safe_open

import directkv_jax
from directkv_jax import saving

LENGTHS = [5, 16, 33, 0]


def contents(cache, lengths):
    keys, values = cache_builder.read_tokens(cache)
    return [(keys[:, b, :n].tobytes(), values[:, b, :n].tobytes()) for b, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("placement", "other"), [("host", "device"), ("device", None)])
def test_what_is_saved_comes_back(tmp_path, monkeypatch, dtype, placement, other):
    built = cache_builder.build(
        LENGTHS, max_length=48, num_layers=2, dtype=dtype, placement=placement
    )
    # Pieces of two pages, and a last one that is not full.
    monkeypatch.setattr(saving, "PIECE_BYTES", 2 * 2 * built.cache.layout.page_bytes)
    built.cache.save(tmp_path / "cache")
    loaded = directkv_jax.KVCache.load(tmp_path / "cache", placement=other)
    assert loaded.placement == (other or placement)
    assert (loaded.max_length, loaded.dtype) == (48, built.cache.dtype)
    assert loaded.lengths.tolist() == LENGTHS
    assert contents(loaded, LENGTHS) == contents(built.cache, LENGTHS)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_only_pages_in_use_are_saved(tmp_path):
    built = cache_builder.build(LENGTHS, max_length=4800, num_layers=2)
    built.cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="numpy") as file:
        assert file.get_slice("cache.pages").get_shape()[0] == 1 + 1 + 3 + 0


def test_forked_rows_get_pages_of_their_own(tmp_path):
    built = cache_builder.build([33, 16], max_length=48, num_layers=1)
    cache = built.cache.fork(jnp.int32([0, 0]))
    before = contents(cache, [33, 33])
    cache.save(tmp_path / "cache")
    loaded = directkv_jax.KVCache.load(tmp_path / "cache")
    assert len(set(np.asarray(loaded.page_table).ravel().tolist())) == loaded.num_pages
    assert contents(loaded, [33, 33]) == before


def test_a_longer_cache_can_take_it_over(tmp_path):
    built = cache_builder.build(LENGTHS, max_length=48)
    cache = built.cache.replace(overflowed=built.cache.overflowed.at[1].set(True))
    cache.save(tmp_path / "cache")
    loaded = directkv_jax.KVCache.load(tmp_path / "cache", max_length=160)
    assert loaded.max_length == 160
    assert loaded.overflowed.tolist() == [False, True, False, False]
    assert contents(loaded, LENGTHS) == contents(built.cache, LENGTHS)
    with pytest.raises(ValueError, match="at least the 33 tokens of a row"):
        directkv_jax.KVCache.load(tmp_path / "cache", max_length=32)


@pytest.mark.parametrize("steps", [(10,), (70, 3)])  # the ring is not yet full, and went round
def test_a_window_goes_on_where_it_was(tmp_path, steps):
    cache = directkv_jax.KVCache.create(
        1, 160, num_kv_heads=2, head_dim=64, dtype=jnp.float32, page_size=16, window=20, rollback=2
    )
    for seed, count in enumerate((*steps, 1)):
        arrays = cache_builder.tokens(seed, 1, count, 4, 2, 64, "float32")
        if count == 1:
            cache.save(tmp_path / "cache")
            other = directkv_jax.KVCache.load(tmp_path / "cache", max_length=320)
            assert other.written.tolist() == cache.written.tolist() == [sum(steps)]
            got, _ = directkv_jax.decode_attention(*arrays, other, local_window_size=(19, 0))
        out, cache = directkv_jax.decode_attention(*arrays, cache, local_window_size=(19, 0))
        cache = cache.advance(count)
    assert np.asarray(got).tobytes() == np.asarray(out).tobytes()


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "cache"
    cache_builder.build(LENGTHS, max_length=48).cache.save(path)
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        directkv_jax.KVCache.load(tmp_path / "other")
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="truncated, damaged"):
        directkv_jax.KVCache.load(path)
    path.write_bytes(whole.replace(saving.FORMAT.encode(), b"something else      "))
    with pytest.raises(ValueError, match="should have the format"):
        directkv_jax.KVCache.load(path)


# What a damaged description may say; another placement or a longer row is no damage.
BAD_DESCRIPTIONS = [
    (key, value)
    for key in ("page_size", "num_kv_heads", "head_dim", "num_layers", "max_length", "rollback")
    for value in (None, "16", 1.5, True, [], {}, -1, 1 << 40)
] + [
    ("num_layers", 2), ("head_dim", 72), ("num_kv_heads", 1), ("dtype", "int32"), ("dtype", "x"),
    ("dtype", "float16"), ("dtype", None), ("placement", "disk"), ("placement", None),
    ("window", 0), ("window", "x"), ("window", 20),
]  # fmt: skip


def test_damaged_headers_name_the_file(tmp_path, monkeypatch):
    """Found before memory is taken for the pages."""
    path = tmp_path / "cache"
    cache_builder.build(LENGTHS, max_length=48).cache.save(path)
    whole = path.read_bytes()

    def retyped(name, dtype, shape):
        def change(header):
            header[name] |= {"dtype": dtype, "shape": shape}

        return change

    def replaced(text):
        return lambda header: header["__metadata__"].update(cache=text)

    def dropped(name):
        return lambda header: header.update({name + "?": header.pop(name)})

    def lengthened(header):
        header["cache.lengths"], header["cache.overflowed"] = (
            header["cache.lengths"] | {"dtype": "BOOL", "shape": [16]},
            header["cache.overflowed"] | {"dtype": "I32", "shape": [1]},
        )

    changes = [
        *(described("cache", key, value) for key, value in BAD_DESCRIPTIONS),
        *map(replaced, ("", "null", "[]", '"cache"', "{}", "[" * 100_000)),
        *map(dropped, ("cache.lengths", "cache.overflowed", "cache.pages")),
        retyped("cache.lengths", "F32", [4]), retyped("cache.lengths", "I32", [2, 2]),
        retyped("cache.pages", "I32", [5, 1, 2, 2048]),
        retyped("cache.pages", "F32", [10, 1, 1, 2048]), lengthened,
    ]  # fmt: skip
    monkeypatch.setattr(directkv_jax._saved, "_write", None)  # nothing gets so far
    for change in changes:
        path.write_bytes(rewritten(whole, change))
        with pytest.raises(ValueError, match=re.escape(str(path))):
            directkv_jax.KVCache.load(path)
    lengths = np.int32(LENGTHS).tobytes()
    for bad in ([5, 16, 33, -1], [5, 16, 32, 0], [5, 16, 1000, 0]):  # 2 pages for the third
        path.write_bytes(whole.replace(lengths, np.int32(bad).tobytes(), 1))
        with pytest.raises(ValueError, match=re.escape(str(path))):
            directkv_jax.KVCache.load(path)


def test_sizes_of_numpy(tmp_path):
    cache = directkv_jax.KVCache.create(
        1, np.int64(64), num_kv_heads=np.int64(2), head_dim=np.int64(64), page_size=np.int64(16),
        window=np.int64(40), rollback=np.int64(2),
    )  # fmt: skip
    cache.save(tmp_path / "cache")
    assert directkv_jax.KVCache.load(tmp_path / "cache").window == 40


def test_what_cannot_be_saved(tmp_path):
    cache = cache_builder.build(LENGTHS, max_length=48).cache
    with pytest.raises(ValueError, match="without rows cannot be saved"):
        cache.take_rows(np.zeros(0, np.int32)).save(tmp_path / "cache")
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda c: c.save(tmp_path / "cache"))(cache)
    with pytest.raises(IsADirectoryError, match="should be the name of a file"):
        cache.save(tmp_path)
    assert not any(tmp_path.iterdir())
    cache.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="`placement` should be"):
        directkv_jax.KVCache.load(tmp_path / "cache", placement="")


def test_metadata_are_texts(tmp_path):
    cache = cache_builder.build(LENGTHS, max_length=48).cache
    for metadata in ({"a": 5}, {1: "a"}, {"a": None}):
        with pytest.raises(TypeError, match="should be texts"):
            saving.save(tmp_path / "cache", {"cache": cache}, metadata)
    assert not any(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    cache = cache_builder.build(LENGTHS, max_length=48).cache
    cache.save(path)
    whole = path.read_bytes()

    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "_pieces", fail)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_the_file_is_safetensors(tmp_path):
    cache_builder.build(LENGTHS, max_length=48).cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="numpy") as file:
        assert set(file.keys()) == {
            "cache.lengths", "cache.overflowed", "cache.pages"
        }  # fmt: skip
        assert json.loads(file.metadata()["cache"])["head_dim"] == 64


def test_a_deleted_cache_cannot_be_saved(tmp_path):
    cache = cache_builder.build(LENGTHS, max_length=48).cache
    jax.block_until_ready(cache.pages)
    cache.delete()
    with pytest.raises(ValueError, match="already donated"):
        cache.save(tmp_path / "cache")
