"""What attention gives, on every implementation: a selection that covers all pairs of options."""

from __future__ import annotations

import itertools

import cache_builder
import numpy as np
import oracle
import pytest
from covering import covering

import directkv_jax

pytestmark = pytest.mark.usefixtures("strict_numerics")

AXES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dim": (64, 80, 96, 128, 256),
    "group": (1, 3, 4, 7, 8, 16),
    "tokens": (1, 2, 5, 33),
    "lengths": ("short", "boundary", "end"),
    "seq_lengths": (None, "ragged", "mostly_zero"),
    "window": (None, 0, 7, "past_a_page"),
    "soft_cap": (None, 3.0),
    "page_size": (16, 64),
    "kv_heads": (1, 2, 3),
    "fresh": (True, False),
    "scale": (None, 0.3),
    "placement": ("host", "device"),
    "num_ctas": (None, 1, 3),
}
PAGES = {16: 5, 64: 3}  # pages of a row, by page size: room for 33 tokens, and a page to cross


CASES = covering(AXES, seed=0)
# Most pairs once more, in other company, for our kernels: they have code for each combination.
MORE = covering(AXES, seed=1)[:22]


def name(case: dict) -> str:
    """A readable test id."""
    window = "" if case["window"] is None else f"-w{case['window']}"
    return (
        f"{case['dtype']}-H{case['head_dim']}-G{case['group']}-K{case['kv_heads']}-T{case['tokens']}"
        f"-{case['lengths']}-{case['seq_lengths'] or 'all'}-p{case['page_size']}{window}"
        f"{'-cap' if case['soft_cap'] else ''}{'-fresh' if case['fresh'] else ''}"
        f"{'' if case['scale'] is None else '-scaled'}-{case['placement']}"
        f"{'' if case['num_ctas'] is None else '-C' + str(case['num_ctas'])}"
    )


def lengths_of(kind: str, page: int, capacity: int, tokens: int) -> list[int]:
    """Empty, one token, around page boundaries, the last slot, full."""
    return {
        "short": [0, 1, page - 1, page],
        "boundary": [page + 1, 2 * page - 1, 2 * page, 2 * page + 1],
        "end": [capacity - tokens, capacity - 1, capacity, 0],
    }[kind]


def seq_lengths_of(kind: str | None, tokens: int) -> list[int] | None:
    """How many new tokens of each row are valid."""
    return {
        None: None,
        "ragged": [tokens, 0, 1, max(1, tokens // 2)],
        "mostly_zero": [0, 0, tokens, 0],
    }[kind]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_attention_is_exact(implementation, case):
    check_attention(implementation, case, CASES.index(case))


@pytest.mark.parametrize("case", MORE, ids=name)
def test_attention_of_the_kernels_is_exact(native, case):
    check_attention(native, case, len(CASES) + MORE.index(case))


def check_attention(implementation, case, seed) -> None:
    """One call against the oracle."""
    page, tokens, kv_heads = case["page_size"], case["tokens"], case["kv_heads"]
    heads, dim, dtype = kv_heads * case["group"], case["head_dim"], np.dtype(case["dtype"])
    capacity = PAGES[page] * page
    lengths = lengths_of(case["lengths"], page, capacity, tokens)
    seq_lengths = seq_lengths_of(case["seq_lengths"], tokens)
    window = page + 2 if case["window"] == "past_a_page" else case["window"]
    built = cache_builder.build(
        lengths, max_length=capacity, num_kv_heads=kv_heads, head_dim=dim, num_layers=2,
        dtype=dtype, page_size=page, seed=seed, placement=case["placement"],
    )  # fmt: skip
    layer = seed % 2
    query, key, value = cache_builder.tokens(
        seed, len(lengths), tokens, heads, kv_heads, dim, dtype, seq_lengths
    )
    fresh = (key, value) if case["fresh"] else ()
    out, lse = directkv_jax.attend(
        query, built.cache, *fresh, layer=layer, scale=case["scale"], return_residual=True,
        query_seq_lengths=None if seq_lengths is None else np.int32(seq_lengths),
        # A Hugging Face window W is (W - 1, 0): nothing to the right, which causal queries lack.
        local_window_size=(window, 0) if case["window"] == "past_a_page" else window,
        logits_soft_cap=case["soft_cap"], implementation=implementation, num_ctas=case["num_ctas"],
    )  # fmt: skip
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    oracle.check(
        out, lse, dtype, query, built.keys[layer], built.values[layer], lengths, *fresh,
        seq_lengths=seq_lengths, scale=case["scale"], soft_cap=case["soft_cap"], window=window,
    )  # fmt: skip


# Query heads of a KV head times new tokens: what a CUDA kernel instance has room for, and more.
ROWS = {4: (4, 1), 16: (8, 2), 32: (4, 8), 64: (8, 8), 128: (16, 8), 144: (16, 9)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", AXES["head_dim"])
@pytest.mark.parametrize("dtype", AXES["dtype"])
def test_every_cuda_kernel(dtype, head_dim, rows):
    group, tokens = ROWS[rows]
    shape = {"dtype": dtype, "head_dim": head_dim, "num_query_heads": 2 * group, "num_kv_heads": 2}
    if reason := directkv_jax.unsupported_reason("cuda", **shape):
        pytest.skip(f'implementation="cuda": {reason}')
    lengths = [150, 64 + rows % 7]
    built = cache_builder.build(
        lengths, max_length=192, num_kv_heads=2, head_dim=head_dim, dtype=np.dtype(dtype),
        page_size=64, seed=rows,
    )  # fmt: skip
    new = cache_builder.tokens(
        rows, len(lengths), tokens, 2 * group, 2, head_dim, np.dtype(dtype), None
    )
    out, lse = directkv_jax.attend(
        new[0], built.cache, *new[1:], return_residual=True, implementation="cuda"
    )
    oracle.check(
        out, lse, np.dtype(dtype), new[0], built.keys[0], built.values[0], lengths, *new[1:]
    )


def test_the_selection_covers_every_pair():
    for a, b in itertools.combinations(AXES, 2):
        seen = {(case[a], case[b]) for case in CASES}
        assert seen == set(itertools.product(AXES[a], AXES[b]))
