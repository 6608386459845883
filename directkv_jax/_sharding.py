"""Custom calls over a mesh: KV heads, and rows, split by `shard_map`.

Outside `shard_map` XLA knows nothing of a custom call and would gather the whole cache first.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class CacheSpecs:
    """Partition specs of everything around a cache whose heads and rows may be split."""

    def __init__(self, batch_axis: str | None, kv_head_axis: str | None):
        b, k = batch_axis, kv_head_axis
        self.pages = PartitionSpec(None, b, k, None)
        self.tokens = PartitionSpec(b, None, k, None)  # query, key, value, out
        self.lse = PartitionSpec(b, None, k)
        self.page_table = PartitionSpec(b, None)
        self.lengths = PartitionSpec(b)
        self.input = PartitionSpec(b, None, None)  # x of a projection
        self.turns = PartitionSpec(b, None, None, None)  # cosine and sine of its RoPE
        self.kernel = PartitionSpec(None, k, None, None)
        self.bias = PartitionSpec(k, None, None)
        self.scalar = PartitionSpec()


def axis_size(mesh: Mesh | None, axis: str | None) -> int:
    """Number of shards along a mesh axis; 1 without one."""
    if mesh is None or axis is None:
        return 1
    if axis not in mesh.shape:
        raise ValueError(f"The mesh has axes {tuple(mesh.shape)}, but no {axis!r}.")
    return mesh.shape[axis]


def over_mesh(fn, mesh: Mesh | None, in_specs, out_specs):
    """`fn` itself without a mesh, else `fn` on each shard."""
    if mesh is None:
        return fn
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if AxisType.Explicit not in mesh.axis_types:
        return sharded

    def with_explicit_axes(*operands):  # such a mesh wants the operands split as the specs say
        return sharded(*(_reshard(x, mesh, s) for x, s in zip(operands, in_specs, strict=True)))

    return with_explicit_axes


def _reshard(x, mesh: Mesh, spec: PartitionSpec):
    if _axes(jax.typeof(x).sharding.spec, x.ndim) == _axes(spec, x.ndim):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _axes(spec: PartitionSpec, ndim: int) -> tuple:
    return tuple(spec) + (None,) * (ndim - len(spec))


def named(mesh: Mesh | None, spec: PartitionSpec) -> NamedSharding | None:
    """A NamedSharding, or None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec)


def check_split(mesh, batch_axis, kv_head_axis, batch: int, pages: int, kv_heads: int) -> int:
    """Checks that every split is even; returns the number of shards of the batch axis."""
    if mesh is None and (batch_axis or kv_head_axis):
        raise ValueError("`batch_axis` and `kv_head_axis` need a `mesh`.")
    rows, heads = axis_size(mesh, batch_axis), axis_size(mesh, kv_head_axis)
    for name, value, axis, size in (
        ("num_kv_heads", kv_heads, kv_head_axis, heads),
        ("batch", batch, batch_axis, rows),
        ("num_pages", pages, batch_axis, rows),
    ):
        if value % size:
            raise ValueError(
                f"`{name}` should be divisible by the {size} shards of mesh axis {axis!r}, but got "
                f"{value}."
            )
    return rows
