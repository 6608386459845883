"""What the configurations of most families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

from directkv_jax.models.config import Experts, LayerConfig, ModelConfig, RopeConfig
from directkv_jax.models.kinds import (
    AMOUNT,
    COUNT,
    EXPERTS,
    FLAG,
    INDEX,
    INTS,
    LAYERS,
    LIST,
    MAPPING,
    POSITIVE,
    TEXT,
    Kind,
    token_ids,
)
from directkv_jax.models.names import LLAMA, Names

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's files are read.

    Attributes:
      config: the values of a `config.json` -> `ModelConfig`.
      names: of the weights.
      spellings: other names that files of the family may have instead.
      ignored: beginnings of the names of tensors that belong to other parts than the text model.
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Names = LLAMA
    spellings: tuple[Names, ...] = ()
    ignored: tuple[str, ...] = ()

    def layout(self, tensors: Container[str]) -> Names:
        """The names that these tensors have."""
        known = (self.names, *self.spellings)
        return next((names for names in known if names.embedding in tensors), self.names)


KINDS: dict[str, Kind] = {
    **dict.fromkeys((
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern",
        "max_position_embeddings", "original_max_position_embeddings", "decoder_sparse_step",
        "no_rope_layer_interval", "ffn_dim", "word_embed_proj_dim",
    ), COUNT),
    "num_hidden_layers": LAYERS,
    # 0 in files of a family that can have experts, and has none.
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), INDEX),
    **dict.fromkeys(("max_window_layers", "bos_token_id"), INDEX),
    **dict.fromkeys((
        "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "query_pre_attn_scalar",
    ), POSITIVE),
    **dict.fromkeys(
        ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping"), AMOUNT
    ),
    **dict.fromkeys((
        "tie_word_embeddings", "attention_bias", "mlp_bias", "enable_bias", "use_sliding_window",
        "norm_topk_prob", "do_layer_norm_before", "use_bidirectional_attention",
    ), FLAG),
    **dict.fromkeys(
        ("model_type", "hidden_act", "hidden_activation", "activation_function"), TEXT
    ),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config"), MAPPING),
    "layer_types": LIST, "mlp_only_layers": INTS, "no_rope_layers": INTS,
}  # fmt: skip


class Values:
    """The values of a `config.json`; null counts as absent.

    One that is asked for, by whatever method, is of the kind that `KINDS` says, or a ValueError.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise ValueError(f"the config lacks `{name}`.")
        value = self._values[name]
        return KINDS[name].check(name, value) if name in KINDS else value

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where there is none."""
        if name not in self._values:
            return default
        return self[name]

    def require(self, *names: str) -> None:
        """All of these.

        Raises:
          ValueError: naming every one that is missing.
        """
        if missing := [name for name in names if name not in self._values]:
            raise ValueError(f"the config lacks {', '.join(f'`{name}`' for name in missing)}.")

    @property
    def head_dim(self) -> int:
        """H; D / N when left out."""
        return self.get("head_dim", self["hidden_size"] // self["num_attention_heads"])

    def rope(self, kind: str | None = None, **changes: Any) -> RopeConfig:
        """The rotary embedding, in either spelling.

        Args:
          kind: which of the mappings, where `rope_parameters` has one for each type of layer.
          **changes: values that go before those found.
        """
        # Transformers 5 moved theta and the scaling into one mapping.
        found = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if kind is not None and kind in found:
            found = MAPPING.check(f"rope_parameters.{kind}", found[kind])
        elif "full_attention" in found or "sliding_attention" in found:
            raise NotImplementedError(
                "`rope_parameters` has a mapping for each type of layer, which this family has not."
            )
        found = {name: value for name, value in dict(found).items() if value is not None}
        if "type" in found:  # the key of older files
            found.setdefault("rope_type", found.pop("type"))
        usual = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
        theta, fraction = (
            found.pop(name) if name in found else self.get(name, usual[name]) for name in usual
        )
        theta = changes.pop("theta", theta)
        if found.get("rope_type", "default") == "default":
            found = {}
        elif "original_max_position_embeddings" in self:
            found.setdefault(
                "original_max_position_embeddings", self["original_max_position_embeddings"]
            )
        POSITIVE.check("rope_theta", theta)
        options = {
            "theta": float(theta), "scaling": _frozen(found), "rotary_fraction": fraction,
            "max_position": self.get("max_position_embeddings", 2048),
        }  # fmt: skip
        return RopeConfig(**{**options, **changes})

    def activation(self, *names: str, default: str = "silu") -> str:
        """The first of these values, under our name; what is unknown stays as it is."""
        found = next((self[name] for name in names if name in self), default)
        return _ACTIVATIONS.get(found, found)

    def layer_types(self, sliding: Callable[[int], bool] = lambda index: False) -> list[bool]:
        """For each layer whether it is one of a sliding window.

        Args:
          sliding: index of a layer -> whether, where the file does not say.
        """
        count = self["num_hidden_layers"]
        types = self.get("layer_types") or [
            "sliding_attention" if sliding(index) else "full_attention" for index in range(count)
        ]
        known = ("full_attention", "sliding_attention")
        if len(types) != count or not all(kind in known for kind in types):
            raise ValueError(
                f"`layer_types` should be {count} of {', '.join(known)}, but got {types!r:.200}."
            )
        return [kind == "sliding_attention" for kind in types]

    def layer(
        self, rope: RopeConfig | None, window: int | None = None, experts: Experts | None = None
    ) -> LayerConfig:
        """A layer of the shapes all layers have."""
        heads = self["num_attention_heads"]
        return LayerConfig(
            heads, self.get("num_key_value_heads", heads), self.head_dim,
            self["intermediate_size"], rope, window, experts,
        )  # fmt: skip

    def model(self, layers, **options: Any) -> ModelConfig:
        """A model of these layers, with what most files have in common."""
        common = {
            "family": self["model_type"],
            "vocab_size": self["vocab_size"],
            "hidden_size": self["hidden_size"],
            "norm_eps": self.get("rms_norm_eps", 1e-6),
            "activation": self.activation("hidden_act"),
            "tie_word_embeddings": self.get("tie_word_embeddings", False),
            "max_position_embeddings": self.get("max_position_embeddings", 2048),
            "bos_token_id": self.get("bos_token_id"),
            "eos_token_id": token_ids(self.get("eos_token_id")),
        }
        return ModelConfig(layers=tuple(layers), **{**common, **options})


REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip


def checked(values: Mapping[str, Any], *required: str) -> Values:
    """`Values` that have what every family needs, and `required`."""
    held = Values(values)
    held.require(*REQUIRED, *required)
    return held


def _frozen(mapping: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    def value(x: Any) -> Any:
        if isinstance(x, Mapping):
            return _frozen(x)
        return tuple(map(value, x)) if isinstance(x, (list, tuple)) else x

    return tuple(sorted((name, value(x)) for name, x in mapping.items()))
