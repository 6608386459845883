"""Rotary position embedding (RoPE), with every scaling that published models use.

Keys are cached after RoPE, so what depends on the length of the context ("dynamic", "longrope") is
decided once, by the capacity of the cache: no cached key is ever turned again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RoPE:
    """A rotary embedding resolved to numbers: element i of a head turns with element i + R/2.

    Attributes:
      frequencies: R/2 angles per position, in radians. R, the rotary dim, is at most H; the
        elements of a head from R on stay as they are.
      factor: what the turned elements are multiplied by.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @classmethod
    def create(
        cls,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_fraction: float = 1.0,
        scaling: Mapping[str, Any] | None = None,
        max_position: int | None = None,
        capacity: int | None = None,
    ) -> RoPE:
        """Frequencies from the numbers of a model's configuration.

        Args:
          head_dim: H.
          theta: the base; `rope_theta` in `scaling` goes before it.
          rotary_fraction: R / H; `partial_rotary_factor` in `scaling` goes before it.
          scaling: `rope_parameters` or `rope_scaling` of a Hugging Face configuration. `rope_type`
            (in older files `type`) is one of `SCALINGS`; keys a type does not use are ignored.
          max_position: `max_position_embeddings` of the configuration.
          capacity: tokens a row of the cache has room for. "dynamic" and "longrope" depend on it;
            None stands for a context as short as the training's.

        Raises:
          NotImplementedError: the type is none of `SCALINGS`.
          ValueError: a value is missing or makes no sense.

        Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); Peng et al. 2023 (YaRN, and
        dynamic, which is NTK-aware); Ding et al. 2024 (LongRoPE); the Llama 3.1 release (llama3).
        """
        values = {name: value for name, value in (scaling or {}).items() if value is not None}
        kind = values.get("rope_type", values.get("type", "default"))
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise NotImplementedError(
                f"`rope_type` should be one of {', '.join(SCALINGS)}, but got {kind!r}."
            )
        theta = values.get("rope_theta", theta)
        fraction = values.get("partial_rotary_factor", rotary_fraction)
        if not _is_number(theta) or not theta > 0:
            raise ValueError(f"`theta` should be positive, but got {theta!r}.")
        if not _is_number(fraction) or not 0 < fraction <= 1:
            raise ValueError(f"`rotary_fraction` should be in (0, 1], but got {fraction!r}.")
        theta, dim = float(theta), int(head_dim * float(fraction))
        if dim < 2 or dim % 2:
            raise ValueError(
                f"The rotary dim should be positive and even, but is {dim}: {fraction:g} of "
                f"H={head_dim}."
            )
        numbers = _Numbers(kind, values, theta, dim, max_position, capacity)
        try:
            frequencies, factor = SCALINGS[kind](numbers)
        except ArithmeticError as error:
            raise ValueError(f"The scaling {values} cannot be computed: {error}.") from error
        if not np.all(np.isfinite(frequencies)) or not math.isfinite(factor):
            raise ValueError(f"The scaling {values} gives frequencies that are not finite.")
        return cls(tuple(map(float, frequencies)), float(factor))

    @property
    def rotary_dim(self) -> int:
        """R."""
        return 2 * len(self.frequencies)

    def rotations(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `rotate` needs, shared by queries, keys and layers.

        Args:
          positions: int32 `[B, T]`.

        Returns:
          Cosine and sine of the angles times `factor`, each float32 `[B, T, 1, R/2]`.
        """
        frequencies = np.asarray(self.frequencies, np.float32)[None, None, None]
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """`rotate(x, self.rotations(positions))`."""
        return rotate(x, self.rotations(positions))


def rotate(x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns queries or keys.

    Args:
      x: `[B, T, heads, H]`.
      rotations: of `RoPE.rotations`, R <= H.

    Returns:
      `[B, T, heads, H]` in x's dtype; computed in float32.
    """
    cos, sin = rotations
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"The rotary dim {2 * half} should be at most H, but H={x.shape[-1]}.")
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + [rest], axis=-1)


@dataclasses.dataclass(frozen=True)
class _Numbers:
    kind: str
    values: dict[str, Any]
    theta: float
    dim: int
    max_position: int | None
    capacity: int | None

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"RoPE scaling of type {self.kind!r} lacks `{name}`.")
        return self.values[name]

    def positive(self, name: str) -> float:
        """A required number above 0."""
        value = self[name]
        if not _is_number(value) or not value > 0:
            raise ValueError(f"`{name}` should be a positive number, but got {value!r}.")
        return float(value)

    @property
    def trained(self) -> float:
        """The longest context of the first training, which the scaling extends."""
        name = "original_max_position_embeddings"
        length = self.values.get(name, self.max_position)
        if length is None or not _is_number(length) or length < 1:
            raise ValueError(
                f"RoPE scaling of type {self.kind!r} needs `{name}` or `max_position`, "
                f"but got {length!r}."
            )
        return float(length)

    @property
    def extension(self) -> float:
        """`factor`, or what the length of the context has grown by where it is not given."""
        if "factor" in self.values:
            return self.positive("factor")
        if self.max_position is None:
            raise ValueError(f"RoPE scaling of type {self.kind!r} needs `factor`.")
        return self.max_position / self.trained

    def plain(self, theta: float | None = None) -> np.ndarray:
        """float64 `[R/2]`: the frequencies without scaling."""
        exponent = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        return (self.theta if theta is None else theta) ** -exponent


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.integer, np.floating, jax.Array)
    if not isinstance(value, kinds) or isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return False
    try:  # also of NumPy or JAX
        return abs(float(value)) < 3e38  # a larger one would be infinite in float32
    except (TypeError, ValueError, OverflowError):
        return False


_Resolved = tuple[np.ndarray, float]


def _default(n: _Numbers) -> _Resolved:
    return n.plain(), 1.0


def _linear(n: _Numbers) -> _Resolved:
    return n.plain() / n.positive("factor"), 1.0


def _dynamic(n: _Numbers) -> _Resolved:
    # The base grows with the context, so that the lowest frequency is stretched by as much as the
    # context is longer than the trained one, the highest not at all.
    if n.max_position is None:
        raise ValueError('RoPE scaling of type "dynamic" needs `max_position`.')
    if n.dim <= 2:
        raise ValueError(f"RoPE scaling of type 'dynamic' needs a rotary dim of 4, not {n.dim}.")
    factor = n.positive("factor")
    stretch = factor * max(n.capacity or 0, n.max_position) / n.max_position - (factor - 1)
    return n.plain(n.theta * stretch ** (n.dim / (n.dim - 2))), 1.0


def _llama3(n: _Numbers) -> _Resolved:
    # Frequencies that turn often within the trained context are kept, those that turn seldom are
    # divided by `factor`, those between are interpolated.
    frequency, factor = n.plain(), n.positive("factor")
    low, high = n.positive("low_freq_factor"), n.positive("high_freq_factor")
    if not low < high:
        raise ValueError(f"`low_freq_factor` {low} should be below `high_freq_factor` {high}.")
    turns = n.trained * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor, 1.0


def _yarn(n: _Numbers) -> _Resolved:
    # As llama3, but interpolated by the index of the frequency.
    frequency, factor = n.plain(), n.extension

    def index(turns: float) -> float:  # of the frequency that turns so often, not rounded
        return n.dim * math.log(n.trained / (turns * 2 * math.pi)) / (2 * math.log(n.theta))

    first = index(n.positive("beta_fast") if "beta_fast" in n.values else 32)
    last = index(n.positive("beta_slow") if "beta_slow" in n.values else 1)
    if n.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n.dim - 1)
    width = last - first if last != first else 0.001
    divided = np.clip((np.arange(n.dim // 2) - first) / width, 0.0, 1.0)
    scaled = divided * frequency / factor + (1 - divided) * frequency
    if "attention_factor" in n.values:
        return scaled, n.positive("attention_factor")
    if n.values.get("mscale") and n.values.get("mscale_all_dim"):
        numerator, denominator = n.positive("mscale"), n.positive("mscale_all_dim")
        return scaled, _magnitude(factor, numerator) / _magnitude(factor, denominator)
    return scaled, _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(n: _Numbers) -> _Resolved:
    # One divisor for each frequency, from one of two lists.
    is_long = n.capacity is not None and n.capacity > n.trained
    name = "long_factor" if is_long else "short_factor"
    divisors = n[name]
    if (
        not (isinstance(divisors, (list, tuple)) or getattr(divisors, "ndim", None) == 1)
        or len(divisors) != n.dim // 2
        or not all(_is_number(each) and each > 0 for each in divisors)
    ):
        raise ValueError(f"`{name}` should be R/2 = {n.dim // 2} positive numbers.")
    frequency = n.plain() / np.asarray(divisors, np.float64)
    if "attention_factor" in n.values:
        return frequency, n.positive("attention_factor")
    if (factor := n.extension) <= 1:
        return frequency, 1.0
    return frequency, math.sqrt(1 + math.log(factor) / math.log(n.trained))


# By `rope_type`.
SCALINGS: dict[str, Callable[[_Numbers], _Resolved]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
