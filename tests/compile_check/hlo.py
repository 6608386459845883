"""Reads from a compiled program whether the host cache is used where it lies."""

from __future__ import annotations

import dataclasses
import re

# What may hand a host buffer on without touching its bytes.
_PASS = {
    "bitcast",
    "call",
    "conditional",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
    "while",
}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$", re.M)
HOST = "S(5)"  # XLA's memory space of page-locked host memory, in the layout of a shape


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a compiled program does with memory; `problems` is empty if the cache is not copied."""

    cache_bytes: int
    hbm_temp_bytes: int
    problems: tuple[str, ...]


def host_misuse(text: str, targets) -> list[str]:
    """Instructions, other than those that pass buffers on and our calls, with a host value."""
    found = [match.groups() for match in _INSTRUCTION.finditer(text)]
    host = {name for name, shape, _, _ in found if HOST in shape}
    if not host:
        return ["no value in host memory at all: the memory kind was dropped"]

    def touches(name: str, rest: str) -> bool:
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        return name in host or not host.isdisjoint(operands)

    def ours(rest: str) -> bool:
        return any(f'custom_call_target="{target}"' in rest for target in targets)

    return [
        f"{name} = {shape} {operation}"
        for name, shape, operation, rest in found
        if operation not in _PASS and touches(name, rest) and not ours(rest)
    ]


def examine(compiled, cache_bytes: int, num_layers: int, targets) -> Finding:
    """Checks a compiled program that takes, updates and returns one host cache.

    No copy instruction proves too little: a slice read by a custom call is staged through device
    memory without one. So the sizes are compared too. The cache must be aliased from argument to
    result to the byte, host memory must have no temporary, and those of device memory must stay
    below an eighth of one layer.

    Args:
      compiled: a `jax.stages.Compiled`.
      cache_bytes: of the cache, on one device.
      num_layers: L.
      targets: names of our FFI targets.
    """
    memory = compiled.memory_analysis()
    problems = host_misuse(compiled.as_text(), targets)
    if (alias := memory.host_alias_size_in_bytes) != cache_bytes:
        problems.append(f"{alias} bytes of host memory are updated in place, not {cache_bytes}")
    if temp := memory.host_temp_size_in_bytes:
        problems.append(f"{temp} bytes of temporaries in host memory")
    limit = cache_bytes // num_layers // 8
    if (temp := memory.temp_size_in_bytes) > limit:
        problems.append(f"{temp} bytes of temporaries in device memory, more than {limit}")
    return Finding(cache_bytes, memory.temp_size_in_bytes, tuple(problems))
