"""Which implementation is chosen, what a missing one says, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import threading

import cache_builder
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import directkv_jax
from directkv_jax.implementations import Request, choose

pytestmark = pytest.mark.usefixtures("strict_numerics")


def request(platform, placement="host", heads=8):
    return Request(platform, placement, jnp.dtype("bfloat16"), 128, heads, 8)


def test_every_name_answers():
    assert directkv_jax.implementations == ("cuda", "cpu", "xla", "reference")
    for name in directkv_jax.implementations:
        reason = directkv_jax.unsupported_reason(name)
        assert directkv_jax.is_supported(name) == (reason is None)
    assert directkv_jax.is_supported("xla")
    assert directkv_jax.is_supported("reference")
    with pytest.raises(ValueError, match="should be None or one of cuda, cpu, xla, reference"):
        directkv_jax.is_supported("flash")


def test_kv_heads_alone_may_be_asked_for():
    assert directkv_jax.is_supported("xla", num_kv_heads=8)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"dtype": jnp.float64}, "`dtype` should be one of"),
        ({"dtype": "int8"}, "`dtype` should be one of"),
        ({"head_dim": 7}, "`head_dim` should be a multiple of 8"),
        (
            {"num_query_heads": 3, "num_kv_heads": 2},
            "`num_query_heads` should be a multiple of K=2",
        ),
        ({"num_kv_heads": 0}, "`num_kv_heads` should be a positive int"),
        ({"placement": "disk"}, "`placement` should be"),
    ],
)
def test_what_no_cache_has_is_not_supported(shape, reason):
    for name in (None, "xla"):
        assert reason in directkv_jax.unsupported_reason(name, **shape)
        assert not directkv_jax.is_supported(name, **shape)


def test_none_picks_a_reader_of_the_cache_where_it_lies():
    platform = jax.default_backend().replace("gpu", "cuda")
    chosen = choose(None, request(platform)).name
    assert chosen == platform if directkv_jax.is_supported(platform) else chosen == "xla"


def test_none_never_stages_a_host_cache():
    with pytest.raises(NotImplementedError) as error:
        choose(None, request("tpu"))
    assert 'name implementation="xla"' in str(error.value)
    assert 'placement="device"' in str(error.value)
    assert choose("xla", request("tpu")).name == "xla", "named, it is taken"
    assert choose(None, request("tpu", "device")).name == "xla"


def test_a_named_implementation_fails_loudly(native):
    reason = directkv_jax.unsupported_reason(native, num_query_heads=34, num_kv_heads=2)
    assert "17 query heads share a KV head; at most 16 can" in reason
    cache = directkv_jax.KVCache.create(1, 64, num_kv_heads=2, head_dim=64)
    query = np.zeros((1, 1, 34, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f'implementation="{native}" cannot .* 17 query'):
        directkv_jax.attend(query, cache, implementation=native)


def test_importing_is_light():
    heavy = (
        "flax",
        "tokenizers",
        "safetensors",
        "torch",
        "directkv_jax.nnx",
        "directkv_jax.models",
    )
    code = f"import directkv_jax, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_twelve_concurrent_calls_finish(implementation):
    """Handlers that schedule on XLA's pool and wait hang for ever on two cores; ours must not."""
    built = cache_builder.build([150, 192], max_length=192)
    query, _, _ = cache_builder.tokens(0, 2, 4, 8, 2, 64, "float32")

    @jax.jit
    def attend_often(cache, query):  # closed over, the cache would become a device constant
        outs = [
            directkv_jax.attend(query * i, cache, implementation=implementation)
            for i in range(1, 13)  # independent of each other: XLA may run them at once
        ]
        return jnp.stack(outs)

    expected = np.asarray(attend_often(built.cache, query))
    results = [None] * 12

    def work(i):
        for _ in range(5):
            results[i] = np.asarray(attend_often(built.cache, query))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)
