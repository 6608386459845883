"""What the parameters of a model are called in a checkpoint, and how they lie there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from directkv_jax.models.config import ModelConfig

_LAYER = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "experts.router": "mlp.gate",
    "experts.gate_proj": "mlp.experts.{}.gate_proj",
    "experts.up_proj": "mlp.experts.{}.up_proj",
    "experts.down_proj": "mlp.experts.{}.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Names:
    """The names in the files of a family. The defaults are Llama's on Hugging Face.

    Attributes:
      prefix: of all but the output projection.
      head: the output projection.
      block: of the layers, before their number.
      top: names outside of the layers.
      layer: names within a layer; `{}` stands for the number of an expert. Without it one tensor
        holds all experts.
      qkv: one tensor that holds queries, keys and values one after the other, or None.
      gate_up: one tensor that holds gate and up, or None.
    """

    prefix: str = "model."
    head: str = "lm_head"
    block: str = "layers."
    top: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"embed.tokens": "embed_tokens", "norm": "norm"}
    )
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    qkv: str | None = None
    gate_up: str | None = None

    @property
    def embedding(self) -> str:
        """The tensor that every model has."""
        return f"{self.prefix}{self.top['embed.tokens']}.weight"

    def renamed(self, **layer: str) -> Names:
        """With other names within a layer; `__` stands for a dot."""
        changed = {name.replace("__", "."): other for name, other in layer.items()}
        return dataclasses.replace(self, layer={**self.layer, **changed})


LLAMA = Names()


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, or some rows of it.

    Attributes:
      name: of the tensor.
      shape: of the whole tensor.
      rows: the first and the one after the last, or None for all.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None


def sources(names: Names, config: ModelConfig, path: tuple, shape: tuple[int, ...]) -> list[Source]:
    """What a parameter is made of: one tensor; queries, keys and values; or one for each expert.

    Args:
      names: of the family.
      config: of the model.
      path: of the parameter in the model.
      shape: of the parameter.
    """
    *modules, leaf = map(str, path)
    kind = "bias" if leaf == "bias" else "weight"
    turned = shape[::-1] if leaf == "kernel" else shape  # Flax kernels are [in, out]
    if modules[0] != "layers":
        module = ".".join(modules)
        if module == "lm_head":
            return [Source(f"{names.head}.{kind}", turned)]
        return [Source(f"{names.prefix}{names.top[module]}.{kind}", turned)]
    prefix = f"{names.prefix}{names.block}{modules[1]}."
    layer = config.layers[int(modules[1])]
    module = ".".join(modules[2:])
    if module == "attention.qkv_proj":
        if leaf in ("query_norm", "key_norm"):
            return [Source(f"{prefix}{names.layer[f'attention.{leaf}']}.weight", shape)]
        return _qkv(names, prefix, kind, shape, leaf)
    if module == "mlp.router":
        module = "experts.router"
    if module == "mlp":  # the stacked kernels [E, in, out] of experts
        pattern = f"{prefix}{names.layer[f'experts.{leaf}']}.weight"
        if "{}" not in pattern:
            return [Source(pattern, (shape[0], *shape[:0:-1]))]
        return [Source(pattern.format(e), shape[:0:-1]) for e in range(shape[0])]
    if names.gate_up and module in ("mlp.gate_proj", "mlp.up_proj"):
        inner = layer.intermediate_size
        begin = inner if module == "mlp.up_proj" else 0
        whole = (2 * inner, *turned[1:])
        return [Source(f"{prefix}{names.gate_up}.{kind}", whole, (begin, begin + inner))]
    return [Source(f"{prefix}{names.layer[module]}.{kind}", turned)]


def _qkv(names: Names, prefix: str, kind: str, shape, leaf: str) -> list[Source]:
    inputs = shape[:1] if leaf == "kernel" else ()
    kv_heads, parts, head_dim = shape[-3:]
    rows = [heads * head_dim for heads in (kv_heads * (parts - 2), kv_heads, kv_heads)]
    if names.qkv is None:
        return [
            Source(f"{prefix}{names.layer[f'attention.{part}']}.{kind}", (count, *inputs))
            for part, count in zip(("query", "key", "value"), rows, strict=True)
        ]
    ends = [sum(rows[: i + 1]) for i in range(3)]
    return [
        Source(f"{prefix}{names.qkv}.{kind}", (ends[-1], *inputs), (end - count, end))
        for end, count in zip(ends, rows, strict=True)
    ]
