"""Hyperparameters of a Llama-family model, under the names Hugging Face gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from directkv_jax.rope import RoPE

# Those of directkv_jax.rope that do not depend on the capacity of the cache.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a Llama model. Letters: D, N, K, H, L of the package docstring.

    Attributes:
      vocab_size: rows of the embedding.
      hidden_size: D.
      intermediate_size: width of the SwiGLU between `gate_proj` and `down_proj`.
      num_hidden_layers: L.
      num_attention_heads: N.
      num_key_value_heads: K; N when left out.
      head_dim: H; D / N when left out.
      rms_norm_eps: added to the mean square.
      rope_theta: base of the rotary frequencies.
      rope_scaling: a mapping with `rope_type` "linear", "llama3" or "yarn" and the numbers these
        need (`directkv_jax.RoPE`), stored as sorted pairs so that the config stays hashable.
      rope_freq_divisors: one divisor for each of the H/2 frequencies, as GGUF files store the
        llama3 scaling; excludes `rope_scaling`.
      tie_word_embeddings: whether the embedding is also the output projection.
      attention_bias: whether the four attention projections have a bias.
      mlp_bias: whether the three MLP projections have one.
      max_position_embeddings: longest context of the training.
      bos_token_id: the token a text starts with, if any.
      eos_token_id: the tokens that end a text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    rope_freq_divisors: tuple[float, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` should be a positive int, but got {value!r}.")
        put("head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` (N={self.num_attention_heads}) should be a multiple of "
                f"`num_key_value_heads`, but got K={self.num_key_value_heads}."
            )
        if not isinstance(self.head_dim, int) or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"`head_dim` should be a positive even int, but got {self.head_dim}.")
        put("eos_token_id", token_ids(self.eos_token_id))
        put("rope_scaling", _checked_rope(dict(self.rope_scaling)))
        if self.rope_freq_divisors and self.rope_scaling:
            raise ValueError("`rope_freq_divisors` and `rope_scaling` exclude each other.")
        if self.rope_freq_divisors and len(self.rope_freq_divisors) != self.head_dim // 2:
            raise ValueError(
                f"`rope_freq_divisors` should hold H/2 = {self.head_dim // 2} numbers, "
                f"but got {len(self.rope_freq_divisors)}."
            )
        _ = self.rope  # raises where its numbers make no sense

    @property
    def rope(self) -> RoPE:
        """The rotary embedding of queries and keys."""
        rope = RoPE.create(
            self.head_dim, theta=self.rope_theta, scaling=dict(self.rope_scaling),
            max_position=self.max_position_embeddings,
        )  # fmt: skip
        if not self.rope_freq_divisors:
            return rope
        pairs = zip(rope.frequencies, self.rope_freq_divisors, strict=True)
        return dataclasses.replace(rope, frequencies=tuple(f / divisor for f, divisor in pairs))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """Reads a Hugging Face `config.json`. Keys the model does not know are ignored.

        Raises:
          ValueError: a required key is missing or the architecture is another one.
        """
        values = {name: value for name, value in values.items() if value is not None}
        if (kind := values.get("model_type", "llama")) != "llama":
            raise ValueError(f'`model_type` should be "llama", but got {kind!r}.')
        if (act := values.get("hidden_act", "silu")) != "silu":
            raise ValueError(f'`hidden_act` should be "silu", but got {act!r}.')
        # Transformers 5 moved theta and the scaling into one mapping.
        rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
        if "rope_theta" in rope:
            values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = tuple(sorted(rope.items()))
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ValueError(f"the config lacks {', '.join(f'`{name}`' for name in missing)}.")
        return cls(**{name: values[name] for name in known if name in values})


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is an int, a list or absent in the files; here always a tuple."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(int(token) for token in value)


def _checked_rope(scaling: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    kind = scaling.pop("type", None)  # the key of older files
    kind = scaling.pop("rope_type", kind) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"`rope_type` should be one of {', '.join(ROPE_TYPES)}, but got {kind!r}.")
    if kind == "default" and not scaling:
        return ()
    return tuple(sorted({**scaling, "rope_type": kind}.items()))
