"""What the values in the files of a model should be: a wrong one is named before it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of values.

    Attributes:
      words: what they should be, for messages.
      holds: whether a value is one.
      convert: makes of such a value what we compute with.
    """

    words: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def check(self, name: str, value: Any) -> Any:
        """`value`, converted.

        Raises:
          ValueError: it is of another kind.
        """
        if not self.holds(value):
            raise ValueError(f"`{name}` should be {self.words}, but got {value!r:.80}.")
        return self.convert(value)


def check_all(kinds: Mapping[str, Kind], values: Mapping[str, Any], prefix: str = "") -> None:
    """Checks those of `values` that `kinds` names; messages put `prefix` before the names.

    Raises:
      ValueError: one is of another kind.
    """
    for name, kind in kinds.items():
        if name in values:
            kind.check(f"{prefix}{name}", values[name])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _is_number(value: Any) -> bool:
    # A larger one would be infinite in float32.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38


def _is_list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (list, tuple)) and all(isinstance(each, kinds) for each in value)
    )


MAX_LAYERS = MAX_EXPERTS = 1024  # more than any model has: a file that names more is damaged

COUNT = Kind("a positive int below 2**31", lambda value: _is_int(value) and value > 0)
BYTES = Kind("a positive int", lambda value: type(value) is int and value > 0)
LAYERS = Kind(
    f"an int in [1, {MAX_LAYERS}]", lambda value: COUNT.holds(value) and value <= MAX_LAYERS
)
EXPERTS = Kind(
    f"an int in [0, {MAX_EXPERTS}]", lambda value: _is_int(value) and 0 <= value <= MAX_EXPERTS
)
INDEX = Kind("an int in [0, 2**31)", lambda value: _is_int(value) and value >= 0)
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
AMOUNT = Kind("a number, 0 or more", lambda value: _is_number(value) and value >= 0)
NUMBER = Kind("a number", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, int) and value in (0, 1), bool)
TEXT = Kind("a text", lambda value: isinstance(value, str))
MAPPING = Kind("a mapping", lambda value: isinstance(value, Mapping))
LIST = Kind("a list", lambda value: isinstance(value, (list, tuple)))
TEXTS = Kind("a list of texts", _is_list_of(str))
INTS = Kind("a list of ints", _is_list_of(int))
NUMBERS = Kind("a list of numbers", _is_list_of(int, float))


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is an int, a list or absent in the files; here always a tuple."""
    if value is None:
        return ()
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(INDEX.check("eos_token_id", token) for token in values)
