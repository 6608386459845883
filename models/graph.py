"""A module taken apart for `jax.jit`: its structure as a static argument, parameters as another."""

from __future__ import annotations

from typing import Any

from flax import nnx


class Graph:
    """A graphdef as a static argument. Hashing one anew takes milliseconds, for each token."""

    def __init__(self, graphdef):
        self.graphdef, self._hash = graphdef, hash(graphdef)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other) -> bool:
        return isinstance(other, Graph) and self.graphdef == other.graphdef

    def merge(self, params):
        """The module with these parameters."""
        return nnx.merge(self.graphdef, params)


def split(module: nnx.Module) -> tuple[Graph, Any]:
    """(structure, parameters), which are shared and not copied."""
    graphdef, params = nnx.split(module)
    return Graph(graphdef), params
