"""Penalties as Hugging Face (repetition) and OpenAI (frequency, presence) define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quire.platform.sampling.logits_processors.base import Ids, LogitsProcessor, ProcessorRequest, Row, ids_within
from quire.platform.sampling.params import SamplingParams

# A prompt of so few distinct tokens is kept with each sequence's own: one piece of work instead of two. A longer one is
# shared by the sequences of a request.
_FEW = 4096


class Penalties(LogitsProcessor):
    """repetition_penalty over prompt and output, then frequency_penalty and presence_penalty over the output."""

    forbids = False

    def __init__(self, request: ProcessorRequest) -> None:
        params = request.params
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._repels = params.repetition_penalty != 1.0
        self._counts = bool(params.frequency_penalty or params.presence_penalty)
        self._in_prompt = np.zeros(request.vocab_size if self._repels else 0, dtype=bool)
        if self._repels:
            self._in_prompt[ids_within(request.prompt_ids, request.vocab_size)] = True
        prompt = np.flatnonzero(self._in_prompt)
        few = len(prompt) <= _FEW
        self._prompt = prompt[:0] if few else prompt
        self._history = _History(request.vocab_size, prompt if few else prompt[:0])

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        """As the base class has it."""
        return params.repetition_penalty != 1.0 or bool(params.frequency_penalty or params.presence_penalty)

    def fork(self) -> Self:
        """What is of the prompt is shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._history = self._history.copy()
        return other

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the base class has it."""
        self._history.add(token_ids, self._in_prompt)

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        history = self._history
        if self._repels:
            for ids in (self._prompt, history.new_ids):
                if len(ids):
                    logits[ids] = _repelled(logits[ids], self._repetition)
        if self._counts and len(history.ids):
            logits[history.ids] = logits[history.ids] - self._frequency * history.times - self._presence


class _History:
    """The distinct tokens that one sequence has generated, and how often. first: what `new_ids` begins with."""

    def __init__(self, size: int, first: Ids) -> None:
        self._size = size
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._times = np.empty(16, np.float32)
        self._new = np.concatenate((first, np.empty(16, np.int64)))
        self._new_count = len(first)

    def copy(self) -> _History:
        other = _History(self._size, self.new_ids)
        other._places, other._ids, other._times = dict(self._places), self._ids.copy(), self._times.copy()
        return other

    @property
    def ids(self) -> Ids:
        """The distinct tokens."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> Row:
        """How often each of `ids` came."""
        return self._times[: len(self._places)]

    @property
    def new_ids(self) -> Ids:
        """`first`, and those of `ids` that the prompt does not have."""
        return self._new[: self._new_count]

    def add(self, token_ids: Sequence[int], in_prompt: NDArray[np.bool_]) -> None:
        """in_prompt: [vocab_size], or empty where `new_ids` is not wanted."""
        for token in token_ids:
            place = self._places.get(token)
            if place is not None:
                self._times[place] += 1
            elif 0 <= token < self._size:
                self._add_first(token, in_prompt)

    def _add_first(self, token: int, in_prompt: NDArray[np.bool_]) -> None:
        place = len(self._places)
        if place == len(self._ids):
            self._ids, self._times = _doubled(self._ids), _doubled(self._times)
        self._places[token] = place
        self._ids[place], self._times[place] = token, 1
        if len(in_prompt) and not in_prompt[token]:
            if self._new_count == len(self._new):
                self._new = _doubled(self._new)
            self._new[self._new_count] = token
            self._new_count += 1


def _repelled(logits: Row, penalty: np.float32) -> Row:
    """Divided by the penalty where they are above 0, multiplied by it elsewhere: the lesser of the two for a penalty
    above 1, the larger for one below, which takes a fraction of the time that choosing one by one does."""
    choose = np.minimum if penalty > 1 else np.maximum
    changed: Row = choose(logits / penalty, logits * penalty)
    return changed


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((array, np.empty_like(array)))
