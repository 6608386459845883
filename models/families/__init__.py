"""The families of models, by the `model_type` of their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from directkv_jax.models.families import gemma, llama, mixtral, opt, phi3, qwen, smollm3
from directkv_jax.models.families.common import Family

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **phi3.FAMILIES,
    **smollm3.FAMILIES,
    **mixtral.FAMILIES,
    **opt.FAMILIES,
}


def find(values: Mapping[str, Any]) -> Family:
    """The family of a configuration.

    Raises:
      TypeError: it is no mapping.
      ValueError: `model_type` is missing or unknown.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"a configuration should be a mapping, but got {values!r:.80}.")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"`model_type` should be one of {', '.join(sorted(FAMILIES))}, but got {kind!r:.80}."
        )
    return FAMILIES[kind]
