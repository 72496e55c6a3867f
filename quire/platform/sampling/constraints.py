"""What a request forbids, favours and penalizes, made into arrays when it arrives.

A step applies them to a row of logits. What that costs depends on the vocabulary and on what was generated since the
last step, and never on how long the lists in the request were: a row in company must not wait for another's lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.platform.sampling.params import SamplingParams

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

# One pass over all logits costs as much as picking out one in so many.
_DENSE = 32
# Keys of a node beside token ids: what ends the words that lead there; and that with all on the way, once asked for.
_HERE, _ALL = "here", "all"


class Constraints:
    """What one request's parameters do to its logits; its sequences share it. Any thread may make it.

    prompt_ids: ids without a logit among them count for nothing. stop_ids: forbidden before `min_tokens`. bad_words:
    tokenized. size: the number of logits.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Iterable[int],
        bad_words: Sequence[tuple[int, ...]],
        size: int,
    ) -> None:
        self.size = size
        self._only = params.allowed_token_ids is not None
        self._ids, self._shift = _shifts(params, bad_words, size)
        self._words = _Words(word for word in bad_words if len(word) > 1 and word[-1] < size)
        self._min_tokens = params.min_tokens
        self._stops = ids_within(sorted(stop_ids), size) if params.min_tokens else None
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self.repels = params.repetition_penalty != 1.0
        self.counts = bool(params.frequency_penalty or params.presence_penalty)
        self._prompt: Ids | None = None
        self.in_prompt: NDArray[np.bool_] | None = None
        if self.repels:
            self.in_prompt = np.zeros(size, dtype=bool)
            self.in_prompt[ids_within(prompt_ids, size)] = True
            self._prompt = np.flatnonzero(self.in_prompt)

    def apply(self, row: Row, output_ids: Sequence[int], history: History) -> Row:
        """A changed copy of a row [size] behind the tokens `output_ids`, of whose sequence `history` is."""
        row = self._shifted(row)
        last = self._words.after(output_ids)
        if last is not None:
            row[last] = -math.inf
        if len(output_ids) < self._min_tokens:
            row[self._stops] = -math.inf
        if self.repels or self.counts:
            history.follow(output_ids)
            self._penalize(row, history)
        return row

    def _shifted(self, row: Row) -> Row:
        """With allowed_token_ids, the bad words of one token and logit_bias: -inf and biases, added."""
        if self._ids is None:
            return row + self._shift
        if self._only:
            changed = np.full_like(row, -math.inf)
            changed[self._ids] = row[self._ids] + self._shift
            return changed
        changed = row.copy()
        if len(self._ids):
            changed[self._ids] += self._shift
        return changed

    def _penalize(self, row: Row, history: History) -> None:
        """Penalties as Hugging Face (repetition) and OpenAI (frequency, presence) define them; in place."""
        if self.repels:
            assert self._prompt is not None
            for ids in (self._prompt, history.new_ids):
                if len(ids):
                    row[ids] = _repelled(row[ids], self._repetition)
        if self.counts and len(history.ids):
            row[history.ids] = row[history.ids] - self._frequency * history.times - self._presence


class History:
    """The distinct tokens that one sequence has generated and how often, kept from step to step.

    Of a sequence's own: where it goes on with a token fewer than before, it is read anew.
    """

    def __init__(self, constraints: Constraints) -> None:
        self._in_prompt = constraints.in_prompt
        self._size = constraints.size
        self._clear()

    def _clear(self) -> None:
        self._length = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._times = np.empty(16, np.float32)
        self._new = np.empty(16, np.int64)
        self._new_count = 0

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
        """Those of them that the prompt does not have."""
        return self._new[: self._new_count]

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take the tokens that have come since the last call."""
        if len(output_ids) < self._length:
            self._clear()
        for token in output_ids[self._length :]:
            place = self._places.get(token)
            if place is not None:
                self._times[place] += 1
            elif 0 <= token < self._size:
                self._add(token)
        self._length = len(output_ids)

    def _add(self, token: int) -> None:
        place = len(self._places)
        if place == len(self._ids):
            self._ids, self._times = _doubled(self._ids), _doubled(self._times)
        self._places[token] = place
        self._ids[place], self._times[place] = token, 1
        if self._in_prompt is not None and not self._in_prompt[token]:
            if self._new_count == len(self._new):
                self._new = _doubled(self._new)
            self._new[self._new_count] = token
            self._new_count += 1


class Rules:
    """A request's constraints for one of its sequences, or for several that have generated nothing yet."""

    __slots__ = ("_constraints", "_history")

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._history = History(constraints)

    def apply(self, row: Row, output_ids: Sequence[int]) -> Row:
        """A changed copy of the row [V] behind these tokens."""
        return self._constraints.apply(row, output_ids, self._history)


class _Words:
    """Words of several tokens by what comes before their last: a tree that is walked from the newest token back.

    The walk ends where no word goes on, so it costs what matches, however many words there are.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        last: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            last.setdefault(word[:-1], []).append(word[-1])
        self._root: dict[Any, Any] = {}
        for before, ids in last.items():
            node = self._root
            for token in reversed(before):
                node = node.setdefault(token, {})
            node[_HERE] = np.array(ids, np.int64)

    def after(self, output_ids: Sequence[int]) -> Ids | None:
        """The tokens that would complete a word."""
        node: dict[Any, Any] | None = self._root
        if not node:
            return None
        found: list[Ids] = []
        deepest = node
        for token in reversed(output_ids):
            node = node.get(token)
            if node is None:
                break
            if _HERE in node:
                found.append(node[_HERE])
                deepest = node
        if not found:
            return None
        if _ALL not in deepest:
            deepest[_ALL] = np.concatenate(found)
        return deepest[_ALL]


def is_constrained(params: SamplingParams, bad_words: Sequence[tuple[int, ...]], generated: int) -> bool:
    """Whether anything is done to a row's logits before its token is chosen; generated: tokens so far."""
    return bool(
        params.allowed_token_ids is not None
        or bad_words
        or generated < params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def ids_within(ids: Any, size: int) -> Ids:
    """As an array, without ids that have no logit (a placeholder in the prompt may lie outside)."""
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < size)]


def _shifts(params: SamplingParams, bad_words: Sequence[tuple[int, ...]], size: int) -> tuple[Ids | None, Row]:
    """(ids, what is added to their logits); ids None: to all of them."""
    shift = np.full(size, -0.0, np.float32)  # -0.0 changes nothing at all; 0.0 would make 0.0 of -0.0
    touched = np.zeros(size, dtype=bool)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
        values = np.fromiter(params.logit_bias.values(), np.float32, len(ids))
        inside = (ids >= 0) & (ids < size)
        shift[ids[inside]], touched[ids[inside]] = values[inside], True
    banned = ids_within([word[0] for word in bad_words if len(word) == 1], size)
    shift[banned], touched[banned] = -math.inf, True
    if params.allowed_token_ids is not None:
        touched = np.zeros(size, dtype=bool)
        touched[ids_within(params.allowed_token_ids, size)] = True
        shift[~touched] = -math.inf
    ids = np.flatnonzero(touched)
    return (None, shift) if len(ids) * _DENSE > size else (ids, shift[ids])


def _repelled(logits: Row, penalty: np.float32) -> Row:
    """Divided by the penalty where they are above 0, multiplied by it elsewhere: the lesser of the two for a penalty
    above 1, the larger for one below, which takes a fraction of the time that choosing one by one does."""
    choose = np.minimum if penalty > 1 else np.maximum
    changed: Row = choose(logits / penalty, logits * penalty)
    return changed


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate((array, np.empty_like(array)))
