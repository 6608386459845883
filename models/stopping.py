"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    The first is the one that is complete first as the text grows, so that it does not depend on how
    the text is cut into pieces; the longest, if several end together.

    Args:
      strings: the stop strings; none of them empty.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What may be shown after `text` has come; sets `found` once there is a stop string."""
        text = self._held + text
        ends = [
            (start + len(string), start)
            for string in self._strings
            if (start := text.find(string)) >= 0
        ]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        shown = len(text) - max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of `text` begin `string`, which is not in it."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
