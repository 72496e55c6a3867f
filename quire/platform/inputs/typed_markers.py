"""What users typed that reads as a marker of an image: hidden while a chat template runs, and text afterwards."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

from quire.errors import RequestError

_DIGITS = 9


class TypedMarkers:
    """An unguessable number stands in the place of each, of digits alone: a template may change the case of texts.

    words: the markers. pattern: of those that have numbers in them; "": there are none.
    """

    def __init__(self, words: Iterable[str], pattern: str = "") -> None:
        patterns = [*map(re.escape, dict.fromkeys(words)), *filter(None, [pattern])]
        self._marker = re.compile("|".join(patterns)) if patterns else None
        self._nonce = str(secrets.randbits(128) | 1 << 127)
        self._place = re.compile(rf"{self._nonce}(\d{{{_DIGITS}}})")
        self._numbers: dict[str, int] = {}

    def hide(self, value: Any) -> Any:
        """JSON values without markers in any text, keys included. Raises RequestError for what is nested too deeply."""
        if self._marker is None:
            return value
        try:
            return self._hidden(value, self._marker)
        except RecursionError:
            raise RequestError("messages, tools and template_kwargs must be JSON values: nested too deeply.") from None

    def _hidden(self, value: Any, marker: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return marker.sub(self._number, value)
        if isinstance(value, dict):
            keys = [marker.sub(self._number, key) if isinstance(key, str) else key for key in value]
            return {key: self._hidden(held, marker) for key, held in zip(keys, value.values(), strict=True)}
        if isinstance(value, (list, tuple)):
            return [self._hidden(held, marker) for held in value]
        return value

    def _number(self, found: re.Match[str]) -> str:
        number = self._numbers.setdefault(found[0], len(self._numbers))
        return f"{self._nonce}{number:0{_DIGITS}}"

    def cut(self, text: str) -> tuple[list[str], list[str]]:
        """A text in pieces, and what was typed at each cut."""
        parts, words = self._place.split(text), list(self._numbers)
        return parts[::2], [words[int(number)] for number in parts[1::2]]

    def shown(self, text: str) -> str:
        """A text with what was typed."""
        words = list(self._numbers)
        return self._place.sub(lambda found: words[int(found[1])], text)
