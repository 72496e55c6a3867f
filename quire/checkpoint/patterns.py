"""Regular expressions from a stranger's file: matched in bounded time, in which other threads run, or refused.

Python's `re` can be made to take for ever, and nothing else runs meanwhile; `regex` can be given a time limit.
"""

from __future__ import annotations

import re
import time
from functools import cache
from math import prod
from typing import Any

import regex

from quire.errors import AdapterError, QuireError

_SECONDS = 1.0  # for all patterns of a file on all modules
_MOST_CHARACTERS = 2000
_MOST_REPEATS = 10_000  # {m,n} are unrolled when a pattern is compiled, and those in each other multiply
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")
_RECURSION = re.compile(r"\(\?(?:R|&|P>|[+-]?\d)")  # which `re` does not have
_PLAIN = re.compile(r"[\w.-]+")


class Patterns:
    """The patterns of one file. Raises `error`, which names the file `where`, for those that are refused."""

    def __init__(self, where: str, error: type[QuireError] = AdapterError) -> None:
        self._where, self._error = where, error
        self._deadline = time.monotonic() + _SECONDS
        self._compile = cache(self._compiled)

    def check_time(self, pattern: str) -> None:
        if time.monotonic() > self._deadline:
            raise self._too_long(pattern)

    def match(self, pattern: str, name: str, before: str = "", behind: str = "") -> Any:
        """`re.match` of the three joined; None where `name` does not begin with such a text."""
        literal, compiled = self._compile(pattern, before, behind)
        if literal not in name:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_long(pattern)
        try:
            return compiled.match(name, timeout=left, concurrent=True)
        except (TimeoutError, MemoryError):
            raise self._too_long(pattern) from None

    def _compiled(self, pattern: str, before: str, behind: str) -> tuple[str, Any]:
        """(what a name must contain, the expression)"""
        self.check_time(pattern)
        if len(pattern) > _MOST_CHARACTERS or _RECURSION.search(pattern):
            raise self._too_long(pattern)
        if prod(max(1, *(int(count or 0) for count in pair)) for pair in _COUNTS.findall(pattern)) > _MOST_REPEATS:
            raise self._too_long(pattern)
        try:
            compiled = regex.compile(before + pattern + behind, cache_pattern=False)
        except regex.error as error:
            raise self._error(f"{self._where}: {pattern!r} is no pattern: {error}") from None
        except (RecursionError, MemoryError, OverflowError):
            raise self._too_long(pattern) from None
        return pattern.rpartition(".")[2] if _PLAIN.fullmatch(pattern) else "", compiled

    def _too_long(self, pattern: str) -> QuireError:
        return self._error(f"{self._where}: the pattern {pattern[:80]!r} is too long, or takes too long.")
