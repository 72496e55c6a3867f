"""thinking_token_budget: a model that has thought for so many tokens is made to end its reasoning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from quire.platform.sampling.logits_processors.base import Following, LogitsProcessor, Row
from quire.platform.sampling.structured.grammar_cache import grammars_of
from quire.platform.sampling.structured.params import ReasoningTexts
from quire.platform.sampling.structured.vocabulary import Vocabulary


class ThinkingBudget(LogitsProcessor):
    """Counts the tokens behind the text that begins the reasoning. Where `budget` are spent, the text that ends it
    follows; what is generated otherwise, and behind it, is free."""

    def __init__(self, vocabulary: Vocabulary, texts: ReasoningTexts, budget: int) -> None:
        self._given = vocabulary.source.digest, texts, budget
        self._vocabulary = vocabulary
        self._begins = tuple(text.encode() for text in texts.begins)
        self._ends = tuple(text.encode() for text in texts.ends)
        self._end_ids = tuple(vocabulary.tokenizer.tokenize_str(texts.ends[0], parse_special=True))
        self._longest = max(map(len, self._ends))
        self._left = budget
        self._open = texts.begun
        self._done = False
        self._text = b""  # the answer's beginning; in the reasoning, what may be the beginning of its end
        self._owed = self._end_ids if self._open and not budget else ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Of an empty answer, as requests are sent."""
        return _elsewhere, self._given

    def fork(self) -> Self:
        """All that changes is replaced, never changed in place."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the base class has it."""
        for token in token_ids:
            if self._done:
                return
            if self._owed:
                self._owed = self._owed[1:]
                self._done = not self._owed
            elif self._open:
                self._think(self._vocabulary.bytes_of(token))
            else:
                self._wait(self._vocabulary.bytes_of(token))

    def _think(self, piece: bytes) -> None:
        text = self._text + piece
        if any(end in text for end in self._ends):
            self._done = True
            return
        self._text = text[-(self._longest - 1) :] if self._longest > 1 else b""
        self._left -= 1
        if self._left <= 0:
            self._owed = self._end_ids

    def _wait(self, piece: bytes) -> None:
        """Reasoning stands at the beginning of an answer, or there is none."""
        self._text = (self._text + piece).lstrip()
        for begin in self._begins:
            if self._text.startswith(begin):
                self._open, self._text = True, b""
                self._owed = () if self._left else self._end_ids
                return
        self._done = not any(begin.startswith(self._text) for begin in self._begins)

    @property
    def idle(self) -> bool:
        """It has nothing to say until the budget is spent."""
        return not self._owed

    def follow(self, token_ids: Sequence[int], output_ids: Sequence[int]) -> Following | None:
        """As the base class has it."""
        if self._done:
            return None
        other = self.fork()
        other.advance(token_ids)
        return Following(other._owed, False) if other._owed else None

    def changed(self, logits: Row, output_ids: Sequence[int]) -> Row:
        """As the base class has it."""
        if not self._owed:
            return logits.copy()
        changed = np.full_like(logits, -math.inf)
        changed[self._owed[0]] = logits[self._owed[0]]
        return changed

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        logits[:] = self.changed(logits, output_ids)


def _elsewhere(digest: bytes, texts: ReasoningTexts, budget: int) -> ThinkingBudget:
    """What was sent, in another process."""
    return ThinkingBudget(grammars_of(digest).vocabulary, texts, budget)
