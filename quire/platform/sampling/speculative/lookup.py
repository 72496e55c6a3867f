"""Draft tokens by looking up: what came behind the last tokens where they stood before.

In the sequence itself (prompt lookup: summaries, edits and code repeat their prompts), or in earlier answers too (an
agent's or a template's answers repeat each other; arXiv:2411.04975 has the idea).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

_MOST_PLACES = 32  # of one run of tokens that are looked at, the last ones
_LONGEST = 32  # tokens that a match is compared by at most
_MOST_READ = 512  # tokens that an index takes in at once: a long prompt holds no step up
_MOST_TOKENS = 1 << 18  # of earlier answers that are kept
_MOST_ROOTS = 256  # for which answers are kept


class Proposal(NamedTuple):
    """Tokens that may come next. match: how many of the last tokens stood before those that they were taken from."""

    tokens: tuple[int, ...]
    match: int


NOTHING = Proposal((), 0)


class Proposer(Protocol):
    """Where draft tokens come from. Sequences are known by their ids."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], root: bytes, most: int) -> Proposal:
        """Up to `most` tokens that may follow all of a sequence's. root: of its prefix keys: tokens of sequences that
        have another one are none of its business."""
        ...

    def end(self, sequence_id: int, output_ids: Sequence[int], root: bytes) -> None:
        """A sequence has ended, with these tokens behind its prompt."""
        ...


class TokenIndex:
    """Where runs of `least` tokens stand in a text that grows.

    A run is found by its last places; the longest match of the text's end among these wins, the later one of two.
    """

    __slots__ = ("_least", "_places", "_read")

    def __init__(self, least: int) -> None:
        self._least = least
        self._read = 0  # tokens that are in the index
        self._places: dict[tuple[int, ...], list[int]] = {}  # of a run: where it ends

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens, up to _MOST_READ, but for the last: the text's end is not to be found at its own
        place."""
        least, places = self._least, self._places
        length = min(len(token_ids), self._read + _MOST_READ)
        for end in range(max(self._read, least), length):
            run = tuple(token_ids[end - least : end])
            found = places.get(run)
            if found is None:
                places[run] = [end]
            else:
                found.append(end)
                if len(found) > _MOST_PLACES:
                    del found[0]
        self._read = max(self._read, length)

    def find(self, token_ids: Sequence[int], tail: Sequence[int]) -> tuple[int, int]:
        """(place behind the longest match, its length) of the end of `tail` in the text; (0, 0): there is none."""
        best, longest = 0, 0
        if len(tail) >= self._least:
            for end in reversed(self._places.get(tuple(tail[len(tail) - self._least :]), ())):
                length = _common_end(token_ids, end, tail)
                if length > longest:
                    best, longest = end, length
                if length == _LONGEST:
                    break
        return best, longest


def _common_end(token_ids: Sequence[int], end: int, tail: Sequence[int]) -> int:
    """How many tokens before `end` are the last ones of `tail`, up to _LONGEST."""
    most = min(end, len(tail), _LONGEST)
    length, last = 0, len(tail)
    while length < most and token_ids[end - 1 - length] == tail[last - 1 - length]:
        length += 1
    return length


def _behind(token_ids: Sequence[int], place: int, most: int) -> tuple[int, ...]:
    """The tokens from `place` on; where the text ends, it goes on as it would if it repeated itself."""
    tokens = list(token_ids[place : place + most])
    period = len(token_ids) - place
    while len(tokens) < most:
        tokens.append(tokens[-period])
    return tuple(tokens)


class PromptLookup:
    """From the sequence's own tokens (prompt lookup decoding).

    least, longest: lengths of a match (vLLM's prompt_lookup_min and prompt_lookup_max).
    """

    def __init__(self, least: int, longest: int) -> None:
        self._least = least
        self._longest = longest
        self._indexes: dict[int, TokenIndex] = {}

    def propose(self, sequence_id: int, token_ids: Sequence[int], root: bytes, most: int) -> Proposal:
        """As `Proposer` has it."""
        index = self._indexes.get(sequence_id)
        if index is None:
            index = self._indexes[sequence_id] = TokenIndex(self._least)
        index.extend(token_ids)
        place, length = index.find(token_ids, token_ids[-_LONGEST:])
        if not length or most < 1:
            return NOTHING
        return Proposal(_behind(token_ids, place, most), min(length, self._longest))

    def end(self, sequence_id: int, output_ids: Sequence[int], root: bytes) -> None:
        """As `Proposer` has it."""
        self._indexes.pop(sequence_id, None)


class _Answers:
    """Earlier answers of one root, and where their runs stand."""

    __slots__ = ("_least", "_places", "_texts", "tokens")

    def __init__(self, least: int) -> None:
        self._least = least
        self._texts: deque[Sequence[int]] = deque()
        self._places: dict[tuple[int, ...], tuple[Sequence[int], int]] = {}  # of a run: the last text, and its end
        self.tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        self._texts.append(token_ids)
        self.tokens += len(token_ids)
        for end in range(self._least, len(token_ids)):
            self._places[tuple(token_ids[end - self._least : end])] = token_ids, end

    def drop_oldest(self) -> None:
        text = self._texts.popleft()
        self.tokens -= len(text)
        for end in range(self._least, len(text)):
            run = tuple(text[end - self._least : end])
            found = self._places.get(run)
            if found is not None and found[0] is text:
                del self._places[run]

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, tail: Sequence[int], most: int) -> Proposal:
        found = self._places.get(tuple(tail[len(tail) - self._least :]))
        if found is None:
            return NOTHING
        text, end = found
        return Proposal(tuple(text[end : end + most]), _common_end(text, end, tail))


class AnswerLookup:
    """From the sequence's own tokens and from earlier answers, whichever match is longer.

    Answers are kept by root: those of another salt, or of other adapters, are never found. most_tokens: kept of all,
    the least recently used roots' go first, and of one root the oldest answers.
    """

    def __init__(self, least: int, longest: int, most_tokens: int = _MOST_TOKENS) -> None:
        self._own = PromptLookup(least, longest)
        self._least = least
        self._longest = longest
        self._most_tokens = most_tokens
        self._answers: OrderedDict[bytes, _Answers] = OrderedDict()
        self.tokens = 0  # of all answers that are kept

    def propose(self, sequence_id: int, token_ids: Sequence[int], root: bytes, most: int) -> Proposal:
        """As `Proposer` has it."""
        own = self._own.propose(sequence_id, token_ids, root, most)
        answers = self._answers.get(root)
        if answers is None or own.match >= self._longest or len(token_ids) < self._least:
            return own
        other = answers.find(token_ids[-_LONGEST:], most)
        if not other.tokens or other.match <= own.match:
            return own
        return other._replace(match=min(other.match, self._longest))

    def end(self, sequence_id: int, output_ids: Sequence[int], root: bytes) -> None:
        """As `Proposer` has it."""
        self._own.end(sequence_id, output_ids, root)
        if not self._least < len(output_ids) <= self._most_tokens:
            return
        answers = self._answers.get(root)
        if answers is None:
            answers = self._answers[root] = _Answers(self._least)
        self._answers.move_to_end(root)
        answers.add(tuple(output_ids))
        self.tokens += len(output_ids)
        while self.tokens > self._most_tokens or len(self._answers) > _MOST_ROOTS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        root, answers = next(iter(self._answers.items()))
        before = answers.tokens
        answers.drop_oldest()
        self.tokens -= before - answers.tokens
        if not len(answers):
            del self._answers[root]
