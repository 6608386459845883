"""Attention from a layer's input, on every implementation, against a float64 oracle."""

from __future__ import annotations

import functools

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from covering import covering

import directkv_jax
from directkv_jax import QKVProjection, RoPE, qkv_attention

pytestmark = pytest.mark.usefixtures("strict_numerics")

H, K = 64, 2
PARTS = ("query", "key", "value")
LENGTHS = [0, 17, 40]
AXES = {
    "width": (64, 576, 896, 2048, 4096, 5120),
    "tokens": (1, 2, 8, 9, 64, 500),
    "group": (1, 3),
    "bias": (False, True),
    "norms": (None, 0.0, 1.0),  # the offset of their weights
    "rope": (None, "default", "linear", "dynamic", "llama3", "yarn", "longrope", "partial"),
    "weights": ("float32", "bfloat16", "float16"),
    "inputs": ("float32", "bfloat16"),
    "dtype": ("float32", "bfloat16", "float16"),
    "ragged": (False, True),
    "placement": ("host", "device"),
}
CASES = covering(AXES, seed=0)
# Steps that CUDA fuses: few rows, one 16-bit dtype everywhere.
FUSED = [
    case | {"weights": case["dtype"], "inputs": case["dtype"]}
    for case in covering(
        {name: AXES[name] for name in AXES if name not in ("weights", "inputs")}
        | {"tokens": (1, 2, 8), "dtype": ("bfloat16", "float16")},
        seed=1,
    )
]

ROPE = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {
        "long_factor": np.linspace(1, 9, H // 2), "short_factor": np.ones(H // 2), "factor": 4.0
    },
}  # fmt: skip


def rope_of(kind: str | None, capacity: int) -> RoPE | None:
    if kind is None:
        return None
    fraction, kind = (0.5, "default") if kind == "partial" else (1.0, kind)
    return RoPE.create(
        H, theta=1e4, rotary_fraction=fraction, max_position=64, capacity=capacity,
        scaling={"rope_type": kind, "original_max_position_embeddings": 64, **ROPE[kind]},
    )  # fmt: skip


def random_projection(rng, case) -> QKVProjection:
    width, group = case["width"], case["group"]
    dtype = jnp.dtype(case["weights"])

    def draw(*shape, scale=1.0, mean=0.0):
        return jnp.asarray(mean + scale * rng.standard_normal(shape, np.float32), dtype)

    heads = [K * group, K, K]
    parts = [draw(width, n, H, scale=width**-0.5) for n in heads]
    biases = {f"{part}_bias": draw(n, H) for part, n in zip(PARTS, heads, strict=True)}
    norms = {
        name: draw(H, scale=0.2, mean=1.0 - (case["norms"] or 0.0))
        for name in ("query_norm", "key_norm")
    }
    return QKVProjection.pack(
        *parts, **(biases if case["bias"] else {}),
        **(norms | {"norm_offset": case["norms"]} if case["norms"] is not None else {}),
    )  # fmt: skip


def project(x, projection: QKVProjection, starts, rope: RoPE | None) -> list[np.ndarray]:
    """query, key, value in float64, one head after the other."""
    x, kernel = np.asarray(x, np.float64), np.asarray(projection.kernel, np.float64)
    width, kv_heads, parts, dim = kernel.shape
    y = (x @ kernel.reshape(width, -1)).reshape(*x.shape[:2], kv_heads, parts, dim)
    if projection.bias is not None:
        y = y + np.asarray(projection.bias, np.float64)
    query, key, value = y[:, :, :, :-2], y[:, :, :, -2:-1], y[:, :, :, -1]

    def normed(z, weight):
        if weight is None:
            return z
        square = np.mean(z**2, -1, keepdims=True) + projection.norm_eps
        return z / np.sqrt(square) * (np.asarray(weight, np.float64) + projection.norm_offset)

    query, key = normed(query, projection.query_norm), normed(key, projection.key_norm)
    if rope is not None:
        half = rope.rotary_dim // 2
        at = np.asarray(starts)[:, None] + np.arange(x.shape[1])
        angle = (at[..., None] * np.array(rope.frequencies))[:, :, None, None]
        turn = rope.factor * np.exp(1j * angle)

        def turned(z):
            pair = (z[..., :half] + 1j * z[..., half : 2 * half]) * turn
            return np.concatenate([pair.real, pair.imag, z[..., 2 * half :]], axis=-1)

        query, key = turned(query), turned(key)
    query = query.reshape(*x.shape[:2], kv_heads * (parts - 2), dim)
    return [query, key[:, :, :, 0], value]


def name(case: dict) -> str:
    return "-".join(f"{value}" if isinstance(value, str) else f"{key[0].upper()}{value}"
                    for key, value in case.items())  # fmt: skip


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def step(cache, x, projection, rope, implementation, seq_lengths):
    (out, lse), cache = qkv_attention(
        x, projection, cache, layer=1, rope=rope, query_seq_lengths=seq_lengths,
        return_residual=True, implementation=implementation,
    )  # fmt: skip
    return cache.advance(seq_lengths), out, lse


@pytest.mark.parametrize("case", CASES, ids=name)
def test_two_steps_are_exact(native, case):
    check_two_steps(native, case)


@pytest.mark.parametrize("case", FUSED, ids=name)
def test_two_fused_steps_are_exact(case):
    if reason := directkv_jax.unsupported_reason("cuda"):
        pytest.skip(f'implementation="cuda": {reason}')
    check_two_steps("cuda", case)


@pytest.mark.parametrize("case", CASES[::7], ids=name)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_two_steps_in_plain_jax_are_exact(implementation, case):
    check_two_steps(implementation, case)


def check_two_steps(implementation, case) -> None:
    """A step of many tokens and one that has a single token of them, both against the oracle."""
    rng = np.random.default_rng(list(map(ord, name(case))))
    tokens, dtype = case["tokens"], np.dtype(case["dtype"])
    rows = slice(2, 3) if tokens == 500 else slice(0, 3)  # the oracle is slow
    lengths = np.array(LENGTHS[rows])
    capacity = -(-(max(LENGTHS) + tokens + 2) // 16) * 16
    built = cache_builder.build(
        lengths, max_length=capacity, num_kv_heads=K, head_dim=H, num_layers=2, dtype=dtype,
        page_size=16, placement=case["placement"],
    )  # fmt: skip
    rope, projection = rope_of(case["rope"], capacity), random_projection(rng, case)
    exact = [np.asarray(array[1], np.float64) for array in (built.keys, built.values)]
    rounded = [array.copy() for array in exact]
    cache = built.cache
    floor = 3e-5 if dtype == np.float32 else None  # sums of D products before the softmax
    for count in (tokens, 1):
        valid = ([count, 0, (count + 1) // 2] if case["ragged"] else [count] * 3)[rows]
        x = rng.standard_normal((len(valid), tokens, case["width"]), np.float32)
        x = jnp.asarray(x, case["inputs"])
        cache, out, lse = step(cache, x, projection, rope, implementation, np.int32(valid))
        assert out.dtype == dtype
        new = project(x, projection, lengths, rope)
        low = [part.astype(dtype).astype(np.float64) for part in new]
        expected = oracle.attend(new[0], *exact, lengths, *new[1:], seq_lengths=valid)
        lowered = oracle.attend(
            low[0], *rounded, lengths, *low[1:], seq_lengths=valid, weight_dtype=dtype
        )
        oracle.compare(out, lse, dtype, expected, lowered, floor)
        for b, (start, n) in enumerate(zip(lengths, valid, strict=True)):
            for kept, fresh in ((exact, new), (rounded, low)):
                for array, part in zip(kept, fresh[1:], strict=True):
                    array[b, start : start + n] = part[b, :n]
        lengths = lengths + valid
        assert np.asarray(cache.lengths).tolist() == lengths.tolist()


def test_pack_keeps_each_head_with_its_kv_head():
    query = jnp.arange(6.0)[None, :, None] * jnp.ones((8, 6, 4))
    key, value = 10.0 + jnp.zeros((8, 2, 4)), 20.0 + jnp.zeros((8, 2, 4))
    packed = QKVProjection.pack(query, key, value)
    assert packed.sizes == (8, 2, 3, 4)
    assert packed.kernel[0, :, :, 0].tolist() == [[0, 1, 2, 10, 20], [3, 4, 5, 10, 20]]


def test_bad_input():
    cache = directkv_jax.KVCache.create(2, 32, num_kv_heads=K, head_dim=H, dtype=jnp.float32)
    x = jnp.zeros((2, 1, 64))

    def weights(width=64, kv_heads=K, head_dim=H, dtype=jnp.float32, **rest):
        return QKVProjection(jnp.zeros((width, kv_heads, 3, head_dim), dtype), **rest)

    def refused(error, message, x=x, projection=None, **options):
        with pytest.raises(error, match=message):
            qkv_attention(x, projection or weights(), cache, **options)

    refused(ValueError, r"`x` should have shape \(B=2, T, D=64\)", x[:1])
    refused(ValueError, "`x` should have shape", x[:, 0])
    refused(ValueError, "`x` should have shape", projection=weights(128))
    refused(ValueError, "D should be a multiple of 8, but is 12", projection=weights(12))
    refused(ValueError, "K=1 heads of H=64, the cache for K=2", projection=weights(kv_heads=1))
    refused(TypeError, "`x` should be float32, .* int32", x.astype(jnp.int32))
    refused(TypeError, "`projection.kernel` should be", projection=weights(dtype=jnp.int8))
    refused(ValueError, "`projection.bias`", projection=weights(bias=jnp.zeros((K, 2, H))))
    refused(ValueError, "`projection.key_norm`", projection=weights(key_norm=jnp.zeros(3)))
    refused(ValueError, "`projection.kernel` should", projection=QKVProjection(jnp.zeros((64, 2))))
    refused(ValueError, "rotary dim 128 should be at most H=64", rope=RoPE.create(128))
    with pytest.raises(ValueError, match="all or none"):
        QKVProjection.pack(*[jnp.zeros((8, 1, 4))] * 3, key_bias=jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="multiple of the heads of key and value, but has 3, of 2"):
        QKVProjection.pack(*(jnp.zeros((8, n, 4)) for n in (3, 2, 2)))
    with pytest.raises(ValueError, match="key has another H or dtype"):
        QKVProjection.pack(*(jnp.zeros((8, 1, h)) for h in (4, 5, 4)))
