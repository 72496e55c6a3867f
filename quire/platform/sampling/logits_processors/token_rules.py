"""allowed_token_ids, bad_words, min_tokens and logit_bias, made into arrays when the request arrives.

What a step then costs depends on the vocabulary, and never on how long the lists in the request were: a row in company
must not wait for another's lists.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from quire.platform.sampling.logits_processors.base import Ids, LogitsProcessor, ProcessorRequest, Row, ids_within
from quire.platform.sampling.params import SamplingParams

# One pass over all logits costs as much as picking out one in so many.
_DENSE = 32


class TokenBias(LogitsProcessor):
    """allowed_token_ids, bad words of one token, and logit_bias: -inf and biases, added to the logits."""

    def __init__(self, request: ProcessorRequest) -> None:
        params, size = request.params, request.vocab_size
        self._only = params.allowed_token_ids is not None
        shift = np.full(size, -0.0, np.float32)  # -0.0 changes nothing at all; 0.0 would make 0.0 of -0.0
        touched = np.zeros(size, dtype=bool)
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(ids))
            inside = (ids >= 0) & (ids < size)
            shift[ids[inside]], touched[ids[inside]] = values[inside], True
        banned = ids_within([word[0] for word in request.bad_words if len(word) == 1], size)
        shift[banned], touched[banned] = -math.inf, True
        if params.allowed_token_ids is not None:
            touched = np.zeros(size, dtype=bool)
            touched[ids_within(params.allowed_token_ids, size)] = True
            shift[~touched] = -math.inf
        self.forbids = bool(np.isneginf(shift).any())
        ids = np.flatnonzero(touched)
        # None: the shift is of all tokens.
        self._ids: Ids | None = None if len(ids) * _DENSE > size else ids
        self._shift = shift if self._ids is None else shift[ids]

    @classmethod
    def needed(cls, request: ProcessorRequest) -> bool:
        """Whether the request's parameters ask for one."""
        params = request.params
        single = any(len(word) == 1 for word in request.bad_words)
        return params.allowed_token_ids is not None or bool(params.logit_bias) or single

    def fork(self) -> Self:
        """Itself: nothing in it changes."""
        return self

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        logits[:] = self.changed(logits, output_ids)

    def changed(self, logits: Row, output_ids: Sequence[int]) -> Row:
        """As the base class has it: copied and changed in one pass."""
        if self._ids is None:
            return logits + self._shift
        if self._only:
            changed = np.full_like(logits, -math.inf)
            changed[self._ids] = logits[self._ids] + self._shift
            return changed
        changed = logits.copy()
        if len(self._ids):
            changed[self._ids] += self._shift
        return changed


class BadWords(LogitsProcessor):
    """Bad words of several tokens: the last one is forbidden where the others have just been generated.

    An automaton reads what is generated (Aho and Corasick, "Efficient string matching", 1975): its state is the longest
    beginning of a word that the output ends with. A token costs the same however many words there are.
    """

    def __init__(self, request: ProcessorRequest) -> None:
        self._words = _Automaton(word for word in request.bad_words if _is_sequence(word, request.vocab_size))
        self._state = 0

    @classmethod
    def needed(cls, request: ProcessorRequest) -> bool:
        """Whether the request's parameters ask for one."""
        return any(_is_sequence(word, request.vocab_size) for word in request.bad_words)

    def fork(self) -> Self:
        """The words are shared."""
        other = object.__new__(type(self))
        other._words, other._state = self._words, self._state
        return other

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the base class has it."""
        for token in token_ids:
            self._state = self._words.after(self._state, token)

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        last = self._words.completing(self._state)
        if last is not None:
            logits[last] = -math.inf


def _is_sequence(word: tuple[int, ...], size: int) -> bool:
    return len(word) > 1 and word[-1] < size


class _Automaton:
    """States are numbers; 0 is the beginning of no word. Of each: the states that a token leads to, the state of the
    longest end of it that begins a word too, and the tokens that complete a word."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._back: list[int] = [0]
        ends: list[set[int]] = [set()]
        for word in words:
            state = 0
            for token in word[:-1]:
                following = self._next[state].get(token)
                if following is None:
                    following = self._next[state][token] = len(self._next)
                    self._next.append({})
                    self._back.append(0)
                    ends.append(set())
                state = following
            ends[state].add(word[-1])
        self._ends = ends
        self._found: dict[int, Ids] = {}  # what `completing` was asked for, as arrays
        self._link()

    def _link(self) -> None:
        """Shorter beginnings before longer ones: a state's `back` is shorter than the state."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for token, following in self._next[state].items():
                self._back[following] = self.after(self._back[state], token)
                waiting.append(following)

    def after(self, state: int, token: int) -> int:
        """The state behind one more token."""
        while True:
            following = self._next[state].get(token)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._back[state]

    def completing(self, state: int) -> Ids | None:
        """The tokens that would complete a word, or None."""
        if state == 0:
            return None
        found = self._found.get(state)
        if found is None:
            last: set[int] = set()
            shorter = state
            while shorter:
                last |= self._ends[shorter]
                shorter = self._back[shorter]
            found = self._found[state] = np.array(sorted(last), np.int64)
        return found if len(found) else None


class MinTokens(LogitsProcessor):
    """No end token before min_tokens."""

    def __init__(self, request: ProcessorRequest) -> None:
        self._least = request.params.min_tokens
        self._stops = ids_within(sorted(request.stop_ids), request.vocab_size)
        self.until = self._least

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        """As the base class has it."""
        return params.min_tokens > 0

    def fork(self) -> Self:
        """Itself: nothing in it changes."""
        return self

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        if len(output_ids) < self._least:
            logits[self._stops] = -math.inf
