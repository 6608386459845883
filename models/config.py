"""What a model is made of: its shapes and constants, layer by layer.

A family (`families/`) reads them from a `config.json`; nothing below it asks which family it was.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from directkv_jax._layout import pages_for
from directkv_jax._page_table import ring_pages
from directkv_jax.models.kinds import AMOUNT, COUNT, NUMBER, POSITIVE, check_all
from directkv_jax.rope import RoPE

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
NORMS = ("rms", "layer")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer, before the capacity of the cache is known.

    Attributes:
      theta: base of the frequencies.
      scaling: `rope_parameters` or `rope_scaling` of a configuration, as sorted pairs.
      rotary_fraction: part of a head that turns.
      max_position: longest context of the training.
      freq_divisors: one divisor for each frequency, as GGUF files store the llama3 scaling.
    """

    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()
    rotary_fraction: float = 1.0
    max_position: int = 2048
    freq_divisors: tuple[float, ...] = ()

    def resolve(self, head_dim: int, capacity: int | None = None) -> RoPE:
        """The rotary embedding for a cache with room for `capacity` tokens in a row.

        Raises:
          ValueError, NotImplementedError: as `RoPE.create`, or another number of divisors.
        """
        rope = RoPE.create(
            head_dim, theta=self.theta, rotary_fraction=self.rotary_fraction,
            scaling=dict(self.scaling), max_position=self.max_position, capacity=capacity,
        )  # fmt: skip
        if not self.freq_divisors:
            return rope
        if len(self.freq_divisors) != len(rope.frequencies):
            raise ValueError(
                f"there should be {len(rope.frequencies)} divisors of frequencies, "
                f"but got {len(self.freq_divisors)}."
            )
        if not all(0 < divisor < math.inf for divisor in self.freq_divisors):
            raise ValueError(
                f"the divisors of frequencies should be positive, but got {self.freq_divisors}."
            )
        pairs = zip(rope.frequencies, self.freq_divisors, strict=True)
        return dataclasses.replace(rope, frequencies=tuple(f / divisor for f, divisor in pairs))


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    Attributes:
      count: E.
      per_token: experts that each token goes to.
      width: of the MLP of one expert.
      normalize: whether the weights of a token's experts are scaled to sum to 1.
    """

    count: int
    per_token: int
    width: int
    normalize: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width"):
            COUNT.check(f"experts.{name}", getattr(self, name))
        if self.per_token > self.count:
            raise ValueError(
                f"a token should go to at most {self.count} experts, but got {self.per_token}."
            )


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One decoder layer. Letters: N, K, H of the package docstring.

    Attributes:
      num_attention_heads: N.
      num_key_value_heads: K, a divisor of N.
      head_dim: H.
      intermediate_size: width of the MLP.
      rope: the rotary embedding, or None.
      window: tokens that a query sees, itself included, or None for all before it.
      experts: instead of the MLP, or None.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig | None = None
    window: int | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        ):  # fmt: skip
            COUNT.check(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` (N={self.num_attention_heads}) should be a multiple of "
                f"`num_key_value_heads`, but got K={self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` should be even, but got {self.head_dim}.")
        if self.window is not None:
            COUNT.check("sliding_window", self.window)
        if self.rope is not None:
            self.rope.resolve(self.head_dim)  # raises where its numbers make no sense


@dataclasses.dataclass(frozen=True)
class Part:
    """Layers whose keys and values lie in one `KVCache`.

    Attributes:
      num_kv_heads: K.
      head_dim: H.
      window: tokens that their queries see, or None for all.
      num_layers: how many they are.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None
    num_layers: int

    def pages(self, max_length: int, page_size: int, rollback: int = 0) -> int:
        """Pages of a row in each layer: those of the whole row, or of a ring that is shorter."""
        row = pages_for(max_length, page_size)
        return (
            row if self.window is None else min(row, ring_pages(self.window, rollback, page_size))
        )

    def keeps_window(self, max_length: int, page_size: int, rollback: int = 0) -> bool:
        """Whether the cache of a row that long is a ring."""
        return self.pages(max_length, page_size, rollback) < pages_for(max_length, page_size)


_KINDS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), COUNT),
    **dict.fromkeys(("norm_eps", "attention_soft_cap", "logit_soft_cap"), AMOUNT),
    "norm_offset": NUMBER, "embedding_scale": POSITIVE,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model. Letters: D, N, K, H, L of the package docstring.

    Attributes:
      family: `model_type` of the configuration it came from.
      vocab_size: rows of the embedding.
      hidden_size: D.
      layers: L of them.
      norm: "rms", or "layer" with a mean and a bias.
      norm_eps: added to the mean square.
      norm_offset: added to the weights of all norms; 1.0 for models that store them minus one.
      sandwich: whether attention and MLP are normed once more before they are added.
      qk_norm: whether queries and keys are normed, head by head.
      attention_bias: whether queries, keys and values have a bias.
      output_bias: whether the projection after attention has one.
      attention_scale: multiplies q.k; None stands for H ** -0.5.
      attention_soft_cap: 0, or c of logits c * tanh(logits / c) before the softmax.
      activation: one of `ACTIVATIONS`.
      gated: whether the MLP is gate * up, or up alone.
      mlp_bias: whether its projections have a bias.
      embedding_scale: multiplies the embedding.
      learned_positions: rows of the embedding of positions; 0: there is none.
      position_offset: the row of position 0.
      tie_word_embeddings: whether the embedding is also the output projection.
      logit_soft_cap: as `attention_soft_cap`, of the output.
      max_position_embeddings: longest context of the training.
      bos_token_id: the token a text starts with, if any.
      eos_token_id: the tokens that end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    sandwich: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    learned_positions: int = 0
    position_offset: int = 0
    tie_word_embeddings: bool = False
    logit_soft_cap: float = 0.0
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_all(_KINDS, vars(self))
        COUNT.check("num_hidden_layers", len(self.layers))
        if self.attention_scale is not None:
            POSITIVE.check("attention_scale", self.attention_scale)
        if self.hidden_size % 8:
            raise ValueError(
                f"`hidden_size` should be a multiple of 8, but got {self.hidden_size}."
            )
        for name, known in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` should be one of {', '.join(known)}, but got "
                    f"{getattr(self, name)!r}."
                )

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The kinds of layers, as far as a cache is concerned, in order of their first layer."""
        kinds = collections.Counter(map(_kind, self.layers))
        return tuple(Part(*kind, count) for kind, count in kinds.items())

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(which part, which layer of the part) of each layer."""
        seen: collections.Counter[tuple] = collections.Counter()
        order = list(dict.fromkeys(map(_kind, self.layers)))
        places = []
        for kind in map(_kind, self.layers):
            places.append((order.index(kind), seen[kind]))
            seen[kind] += 1
        return tuple(places)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json`. Keys the family does not know are ignored.

        Raises:
          ValueError: a required key is missing or makes no sense, or the family is unknown.
          NotImplementedError: the family has what is not implemented here.
        """
        from directkv_jax.models import families

        return families.find(values).config(values)


def _kind(layer: LayerConfig) -> tuple[int, int, int | None]:
    return layer.num_key_value_heads, layer.head_dim, layer.window
