"""`models.plan` against the models themselves and published totals."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from directkv_jax.models import ModelCache, ModelConfig, Transformer, plan
from directkv_jax.models.config import Experts

PARITY = sorted((Path(__file__).parents[1] / "data" / "parity").glob("*/config.json"))
GIB = 1 << 30

# Of the checkpoints, as their hub pages and papers have it, in 10^9; of Gemma 3 the text model.
PUBLISHED = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.8, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "mistral-7b": 7.25, "mixtral-8x7b": 46.7, "gemma-2-9b": 9.24,
    "gemma-3-12b": 11.77, "gemma-3-27b": 27.0, "phi-3-mini": 3.82, "phi-3-medium": 14.0,
    "opt-6.7b": 6.66, "opt-13b": 12.85, "smollm2-135m": 0.1345, "smollm3-3b": 3.08,
}  # fmt: skip


def h200(host_bytes=None):
    return plan.Machine.published("h200", plan.GPUS["h200"], host_bytes)


def test_parameters_of_named_shapes():
    assert set(PUBLISHED) == set(plan.SHAPES)
    for name, billions in PUBLISHED.items():
        counted = plan.count_parameters(plan.shape(name))
        assert counted == pytest.approx(billions * 1e9, rel=0.01), name


@pytest.mark.parametrize("path", PARITY, ids=lambda path: path.parent.name)
def test_parameters_of_every_family(path):
    config = ModelConfig.from_dict(json.loads(path.read_text()))
    state = nnx.eval_shape(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param))
    assert plan.count_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(state))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["smollm2-135m", "gemma-2-9b", "phi-3-mini"]), st.integers(1, 3),
    st.integers(1, 20000), st.sampled_from([16, 64]), st.sampled_from(["host", "device"]),
)  # fmt: skip
def test_cache_bytes_are_those_of_a_cache(name, batch, context, page_size, placement):
    """Windows included: Gemma 2 keeps 4096 tokens, Phi-3 names a window that is never full."""
    config = plan.shape(name)
    work = plan.Workload(batch, context, placement, dtype="float16", page_size=page_size)
    cache = jax.eval_shape(
        lambda: ModelCache.create(
            config, batch, context, dtype=jnp.float16, page_size=page_size, placement=placement
        )
    )
    sizes = plan.sizes_of(config, work)
    assert sizes.kv_host_bytes == cache.host_bytes
    assert sizes.kv_device_bytes == cache.device_bytes
    assert sizes.kv_bytes_per_token == sum(part.bytes_per_token for part in cache.parts)
    assert bool(sizes.ring_layers) == any(part.window for part in cache.parts)


def test_layers_of_a_window_lie_on_the_device_and_are_read_up_to_it():
    config, work = plan.shape("gemma-3-12b"), plan.Workload(2, 131072)
    sizes = plan.sizes_of(config, work)
    token = 2 * 2 * 8 * 256  # bytes of a layer: keys and values, 16 bits, K, H
    ring = 64 * math.ceil(1023 / 64)
    assert sizes.ring_layers == 40
    assert sizes.kv_bytes_per_token == 48 * token
    assert sizes.kv_host_bytes == sizes.read_host_bytes == 2 * 8 * 131072 * token
    assert sizes.kv_device_bytes == 2 * 40 * ring * token
    assert sizes.read_device_bytes == 2 * 40 * 1024 * token
    short = plan.sizes_of(config, dataclasses.replace(work, context=1000))
    assert (short.ring_layers, short.kv_device_bytes) == (0, 0)


def test_a_step_reads_the_experts_its_tokens_choose():
    config = plan.shape("qwen3-30b-a3b")

    def read(batch):
        return plan.sizes_of(config, plan.Workload(batch, 64)).read_weight_bytes

    table = config.vocab_size * config.hidden_size
    everything = 2 * (plan.count_parameters(config) - table)
    of_one = 2 * 48 * 3 * 2048 * 768  # bytes of one expert in all layers
    assert read(1) == everything - 120 * of_one
    # Of two tokens, the second's 8 choices are new with 120/128.
    assert read(2) == pytest.approx(everything - (120 - 7.5) * of_one, rel=1e-6)
    assert everything - of_one < read(10_000) <= everything
    dense = dataclasses.replace(config.layers[0], experts=Experts(count=8, per_token=8, width=768))
    config = dataclasses.replace(config, layers=(dense,) * 48)
    assert read(1) == read(5) == 2 * (plan.count_parameters(config) - table)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["smollm2-135m", "llama-3.2-1b", "gemma-2-9b"]),
    st.integers(1, 40), st.integers(0, 64), st.integers(1, 9), st.integers(1, 20000),
    st.sampled_from(["host", "device"]), st.booleans(),
)  # fmt: skip
def test_the_largest_fits_and_one_more_does_not(name, host, device, batch, context, kv, one):
    config, work = plan.shape(name), plan.Workload(batch, context, kv)
    machine = plan.Machine("m", device * GIB, host_bytes=host * GIB, one_memory=one)

    def fits(**changes):
        return plan.make_plan(config, dataclasses.replace(work, **changes), machine).fits

    longest = plan.largest_context(config, work, machine)
    assert longest % work.page_size == 0
    assert longest == 0 or fits(context=longest)
    assert not fits(context=longest + work.page_size)
    most = plan.largest_batch(config, work, machine)
    assert most == 0 or fits(batch=most)
    assert not fits(batch=most + 1)
    if (budget := plan.smaller_prefill_bytes(config, work, machine)) is not None:
        assert not fits()
        assert not fits(prefill_bytes=2 * budget)
        assert fits(prefill_bytes=budget)


def test_a_smaller_budget_for_prompts():
    config, work = plan.shape("llama-3.2-1b"), plan.Workload(1, 65536)
    need = plan.sizes_of(config, work)
    machine = dataclasses.replace(
        h200(64 * GIB), device_bytes=need.device_bytes - need.activation_bytes // 2
    )
    assert plan.make_plan(config, work, machine).fits is False
    assert plan.smaller_prefill_bytes(config, work, machine) in (1 << 28, 1 << 29)
    assert plan.smaller_prefill_bytes(config, work, h200(64 * GIB)) is None
    assert plan.smaller_prefill_bytes(config, work, h200(1)) is None


def test_what_is_not_known():
    config, work = plan.shape("llama-3.1-8b"), plan.Workload(1, 4096)
    unknown = plan.make_plan(config, work, h200())
    assert (unknown.host.fits, unknown.device.fits, unknown.fits) == (None, True, None)
    assert plan.largest_context(config, work, h200()) is None
    assert plan.largest_batch(config, work, h200()) is None
    on_device = dataclasses.replace(work, placement="device")
    assert plan.make_plan(config, on_device, h200()).fits is True
    # What does not fit the device does not fit, whatever the host has.
    assert plan.make_plan(plan.shape("llama-3.1-70b"), work, h200()).fits is False


def test_without_a_gpu_everything_shares_the_host():
    config, work = plan.shape("smollm2-135m"), plan.Workload(2, 4096)
    made = plan.make_plan(config, work, plan.Machine("cpu", host_bytes=GIB, one_memory=True))
    assert made.host.needed == made.sizes.kv_host_bytes + made.sizes.device_bytes
    assert (made.device, made.step) == (None, None)


def test_machines():
    assert [name for name, gpu in plan.GPUS.items() if gpu.validated] == ["h200"]
    assert len({gpu.kind for gpu in plan.GPUS.values()}) == len(plan.GPUS)
    published = plan.Machine.published("gh200", plan.find_gpu("gh200"))
    assert (published.host_bytes, published.validated) == (480 * 10**9, False)
    assert published.device_bytes == 72 * 10**9  # three quarters, as JAX takes them
    other = plan.Machine.measured("A GPU of the future", 100 * GIB, 64 * GIB, 1e12)
    assert (other.hbm_bytes_per_s, other.validated) == (None, False)
    work = plan.Workload(1, 4096)
    assert plan.make_plan(plan.shape("llama-3.1-8b"), work, other).step is None


def test_what_bounds_a_step():
    def bound(name, *work):
        return plan.make_plan(plan.shape(name), plan.Workload(*work), h200()).step.bound

    assert bound("llama-3.1-8b", 1, 131072) == "link"
    assert bound("llama-3.1-8b", 1, 131072, "device") == "HBM"
    assert bound("smollm2-135m", 1, 64) == "launches"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "`batch` should be a positive int below .*, but got 0"),
        ({"context": -1}, "`context` should be a positive int"),
        ({"context": (1 << 30) + 1}, "`context` should be at most 1073741824"),
        ({"prefill_bytes": 0}, "`prefill_bytes` should be"),
        ({"placement": "disk"}, "`placement` should be one of host, device, but got 'disk'"),
        ({"dtype": "int8"}, "`dtype` should be one of bfloat16, float16, float32"),
        ({"page_size": 20}, "`page_size` should be a multiple of 16"),
    ],
)
def test_bad_workloads(changes, message):
    with pytest.raises(ValueError, match=message):
        plan.sizes_of(
            plan.shape("smollm2-135m"), plan.Workload(**{"batch": 1, "context": 64, **changes})
        )


def test_unknown_names():
    with pytest.raises(ValueError, match=r"one of llama-3.1-8b, .*smollm3-3b, but got 'gpt'"):
        plan.shape("gpt")
    with pytest.raises(ValueError, match=r"one of h200, .*rtx-4090, but got 'tpu'"):
        plan.find_gpu("tpu")
