"""RoPE: the frequencies of every scaling, and what turning queries and keys by them must do."""

from __future__ import annotations

import decimal
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directkv_jax import RoPE
from directkv_jax.rope import SCALINGS, rotate

LONG, SHORT = [1.0 + i for i in range(8)], [1.0 + 0.5 * i for i in range(8)]
SCALED = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "long_factor": LONG, "short_factor": SHORT, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def create(kind: str, head_dim=16, theta=100.0, capacity=None, max_position=256, **changes) -> RoPE:
    scaling = {"rope_type": kind, **SCALED[kind], **changes}
    return RoPE.create(
        head_dim, theta=theta, scaling=scaling, max_position=max_position, capacity=capacity
    )


def plain(theta=100.0, dim=16) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def test_every_scaling_is_tested():
    assert set(SCALED) == set(SCALINGS)


def test_default_and_linear():
    np.testing.assert_allclose(create("default").frequencies, plain())
    assert create("default") == RoPE.create(16, theta=100.0)
    np.testing.assert_allclose(create("linear").frequencies, [f / 4 for f in plain()])


@pytest.mark.parametrize(("capacity", "stretch"), [(None, 1), (100, 1), (256, 1), (1024, 7)])
def test_dynamic_stretches_the_lowest_frequency_by_what_the_context_grew(capacity, stretch):
    # factor * length / trained - (factor - 1) = 2 * 4 - 1
    got = create("dynamic", capacity=capacity).frequencies
    np.testing.assert_allclose(got[0], 1.0)
    np.testing.assert_allclose(got[-1] * stretch, plain()[-1])
    assert np.all(np.diff(got) < 0)


def test_llama3_keeps_high_frequencies_and_divides_low_ones():
    for got, f in zip(create("llama3", theta=1e4).frequencies, plain(1e4), strict=True):
        turns = 64 * f / (2 * math.pi)
        if turns >= 4:
            assert got == pytest.approx(f)
        elif turns <= 1:
            assert got == pytest.approx(f / 8)
        else:
            assert f / 8 < got < f


def test_yarn_keeps_high_frequencies_and_divides_low_ones():
    rope = create("yarn", head_dim=64, theta=1e4, original_max_position_embeddings=4096)
    ratio = np.array(rope.frequencies) / plain(1e4, 64)
    turns = 4096 * np.array(plain(1e4, 64)) / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.7], 0.25)
    assert np.all(np.diff(ratio) <= 1e-12)
    assert rope.factor == pytest.approx(0.1 * math.log(4.0) + 1)
    # The bounds by hand: 32 turns and 1 turn, rounded outwards.
    bound = [32 * math.log(4096 / (t * 2 * math.pi)) / math.log(1e4) for t in (32, 1)]
    first, last = math.floor(bound[0]), math.ceil(bound[1])
    middle = (first + last) // 2
    part = (middle - first) / (last - first)
    assert ratio[middle] == pytest.approx(part / 4 + 1 - part)


def test_yarn_options():
    assert create("yarn", attention_factor=1.5).factor == 1.5
    both = create("yarn", mscale=2.0, mscale_all_dim=1.0)
    assert both.factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    by_length = create("yarn", factor=None)  # 256 / 64
    assert by_length == create("yarn", factor=4.0)
    unrounded = create("yarn", head_dim=64, theta=1e4, truncate=False)
    assert unrounded != create("yarn", head_dim=64, theta=1e4)
    np.testing.assert_allclose(create("yarn", factor=1.0).frequencies, plain())
    assert create("yarn", factor=1.0).factor == 1.0


@pytest.mark.parametrize(("capacity", "divisors"), [(None, SHORT), (64, SHORT), (65, LONG)])
def test_longrope_takes_its_list_by_the_capacity(capacity, divisors):
    rope = create("longrope", capacity=capacity)
    expected = [f / divisor for f, divisor in zip(plain(), divisors, strict=True)]
    np.testing.assert_allclose(rope.frequencies, expected)
    assert rope.factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_both_spellings_and_both_places():
    new = {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    old = RoPE.create(16, theta=100.0, scaling={"type": "linear", "factor": 2}, rotary_fraction=0.5)
    assert RoPE.create(16, scaling=new) == old
    assert old.rotary_dim == 8


def test_positions_and_heads_turn_alike():
    rope = create("yarn")
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 16))
    positions = jnp.array([[0, 1, 2], [7, 8, 9]], jnp.int32)
    got = np.asarray(rope(x, positions))
    for b, t in np.ndindex(2, 3):
        for i, frequency in enumerate(rope.frequencies):
            angle = float(positions[b, t]) * frequency
            turn = np.array(
                [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
            )
            pair = np.stack([x[b, t, :, i], x[b, t, :, i + 8]])
            np.testing.assert_allclose(
                got[b, t][:, [i, i + 8]].T, rope.factor * turn @ pair, rtol=1e-4, atol=1e-5
            )


def test_a_part_of_the_head_turns_and_the_rest_stays():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 16), jnp.bfloat16)
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    part = RoPE.create(16, rotary_fraction=0.25)
    got = part(x, positions)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[..., :4], RoPE.create(4)(x[..., :4], positions))


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(sorted(SCALINGS)), start=st.integers(0, 200), shift=st.integers(0, 200))
def test_a_logit_depends_on_the_distance_alone(kind, start, shift):
    rope = create(kind, capacity=512)
    q, k = jax.random.normal(jax.random.key(start), (2, 1, 1, 1, 16))

    def logit(query_at, key_at):
        at = [jnp.full((1, 1), position, jnp.int32) for position in (query_at, key_at)]
        return float(jnp.sum(rope(q, at[0]) * rope(k, at[1])))

    expected = logit(start + 3, start)
    assert logit(start + 3 + shift, start + shift) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scaling": {"rope_type": "mrope"}}, NotImplementedError, "default, linear, .* 'mrope'"),
        ({"scaling": {"rope_type": "linear"}}, ValueError, "'linear' lacks `factor`"),
        ({"scaling": {"type": "linear", "factor": 0}}, ValueError, "positive number, but got 0"),
        ({"scaling": {"type": "linear", "factor": "2"}}, ValueError, "positive number"),
        ({"scaling": {"type": "dynamic", "factor": 2.0}}, ValueError, "needs `max_position`"),
        ({"scaling": {"type": "yarn", "factor": 2.0}}, ValueError, "needs `original_max"),
        ({"scaling": SCALED["longrope"] | {"type": "longrope"}}, ValueError, "needs `factor`"),
        (
            {"scaling": {"type": "longrope", "short_factor": [1.0], "factor": 2.0}},
            ValueError,
            "`short_factor` should be R/2 = 8 positive",
        ),
        (
            {"scaling": SCALED["llama3"] | {"type": "llama3", "high_freq_factor": 1.0}},
            ValueError,
            "should be below `high_freq_factor`",
        ),
        ({"theta": 0.0}, ValueError, "`theta` should be positive"),
        ({"rotary_fraction": 1.5}, ValueError, r"in \(0, 1\]"),
        ({"rotary_fraction": 0.2}, ValueError, "even, but is 3"),
    ],
)
def test_bad_input(options, error, message):
    with pytest.raises(error, match=message):
        RoPE.create(16, **options)


def test_a_rotary_dim_beyond_the_head_is_refused():
    x = jnp.zeros((1, 1, 1, 8))
    with pytest.raises(ValueError, match="should be at most H, but H=8"):
        rotate(x, RoPE.create(16).rotations(jnp.zeros((1, 1), jnp.int32)))


def test_numbers_of_numpy_and_jax():
    expected = RoPE.create(16, theta=1e4, rotary_fraction=0.5)
    for kind in (np.float32, jnp.float32, int):
        assert RoPE.create(16, theta=kind(1e4), rotary_fraction=0.5) == expected
    scaled = {"rope_type": "longrope", **SCALED["longrope"]}
    whole = RoPE.create(16, scaling=scaled, max_position=256)
    for kind in (np.float32, jnp.float32):
        arrays = {name: kind(scaled[name]) for name in ("long_factor", "short_factor")}
        assert RoPE.create(16, scaling=scaled | arrays, max_position=256) == whole
    scaled = {"rope_type": "llama3", **SCALED["llama3"]}
    whole = RoPE.create(16, scaling=scaled)
    for kind in (np.int32, jnp.int32):
        length = {"original_max_position_embeddings": kind(64)}
        assert RoPE.create(16, scaling=scaled | length) == whole
    for wrong in ("1", None, True, decimal.Decimal(5), [1.0], float("inf"), 10**400, np.ones(2)):
        with pytest.raises(ValueError, match="`theta` should be positive"):
            RoPE.create(16, theta=wrong)
