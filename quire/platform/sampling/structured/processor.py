"""The logits processor that holds an answer to its shape: masks while a grammar is in force, nothing in free text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher

from quire.platform.sampling.logits_processors.base import Following, Ids, LogitsProcessor, ProcessorError, Row
from quire.platform.sampling.results import Failure
from quire.platform.sampling.structured import masks
from quire.platform.sampling.structured.constraint import CompiledConstraint
from quire.platform.sampling.structured.grammar_cache import grammars_of
from quire.platform.sampling.structured.masks import Words
from quire.platform.sampling.structured.template import Stage, Template, read_text, told

_Read = tuple[Any, int]  # (what was read before, or None; a token)
_MOST_FORCED = 1024  # tokens that are certain and told of at once; further ones come with the next


class _Work:
    """The masks of some of a step's rows, on their way."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Words]) -> None:
        self._future = future

    def row(self, place: int) -> Words:
        masks: Words = self._future.result()
        row: Words = masks[place]
        return row


class TokenConstraint(LogitsProcessor):
    """One sequence's place in its constraint.

    stop_ids: the tokens that end the sequence where its shape may end; an end token that is not among them (ignore_eos)
    comes only where nothing else can.
    """

    forbids = True

    def __init__(self, template: Template, stop_ids: frozenset[int]) -> None:
        self._constraint = template.constraint
        self._digest = template.vocabulary.source.digest
        self._stop_ids = stop_ids
        self._begin(template)

    def _begin(self, template: Template | None) -> None:
        """An empty answer. template: None in a process that only sends it on."""
        self._template = template
        self._tail = b""  # of the free text: what may be the beginning of a text that is looked for
        self._place, self._rest = 0, b""  # the trigger; what its token had behind it
        self._matched = 0  # tokens that the matcher has read behind that
        self._read_ids: _Read | None = None  # they, the last one first
        self._is_own = False  # the matcher shares its lexer with no other answer
        self._mask: Words | None = None
        self._work: tuple[_Work, int] | None = None
        self._matcher: LLMatcher | None = None
        self._entered = self._stage = Stage.ENDED
        if template is not None:
            self._entered = self._stage = template.begins
            if self._stage is Stage.GRAMMAR:
                self._matcher = template.matcher(Stage.GRAMMAR)

    def __reduce__(self) -> tuple[Any, ...]:
        """Of an empty answer, as requests are sent. Grammars are compiled over there beforehand."""
        return _elsewhere, (type(self), self._constraint, self._digest, self._stop_ids)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def fork(self) -> Self:
        """The template is shared."""
        self.settle()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        if self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the base class has it. Raises ProcessorError for a grammar that grows beyond its limits."""
        self.settle()
        self._mask = None
        for token in token_ids:
            self._take(token)

    def rollback(self, count: int) -> bool:
        """As the base class has it: within one grammar."""
        self.settle()
        if self._matcher is None or count > self._matched:
            return False
        self._mask = None
        self._matched -= count
        for _ in range(count):
            assert self._read_ids is not None
            self._read_ids = self._read_ids[0]
        self._stage = self._entered
        return self._matcher.rollback(count)

    def _take(self, token: int) -> None:
        matcher, stage = self._matcher, self._stage
        if stage is Stage.ENDED:
            return
        if matcher is None:
            self._read(self._known.vocabulary.bytes_of(token))
            return
        if matcher.is_error():
            matcher = self._renewed()
        lazy = self._known.ends_lazily[stage]
        if lazy and matcher.is_accepting() and matcher.validate_tokens([token]) != 1:
            self._leave(self._known.vocabulary.bytes_of(token))
            return
        if not matcher.consume_token(token):
            matcher = self._renewed()
            if not matcher.consume_token(token):
                raise self._failed(matcher)
        self._matched += 1
        self._read_ids = self._read_ids, token
        if matcher.is_stopped():
            self._end_match(lazy)

    def _end_match(self, lazy: bool) -> None:
        """The matcher takes no more."""
        if lazy:
            self._leave(b"")
        else:
            self._stage = Stage.ENDED

    def _leave(self, piece: bytes) -> None:
        """Free text again, that begins with a piece."""
        self._matcher, self._matched, self._read_ids, self._tail = None, 0, None, b""
        self._entered = self._stage = Stage.FREE
        self._read(piece)

    def _read(self, piece: bytes) -> None:
        """Go on with a piece of free text, which may lead into a grammar."""
        template = self._known
        if self._stage is Stage.OPENING:
            text = self._tail + piece
            begun = text.lstrip()
            if template.opens.startswith(begun) and begun != template.opens:
                self._tail = text
                return
            is_open = begun.startswith(template.opens)
            self._stage = self._entered = Stage.BEFORE if is_open else Stage.FREE
            self._tail, piece = b"", begun[len(template.opens) :] if is_open else text
        found = template.find(self._stage, self._tail, piece)
        if found is None:
            self._tail = (self._tail + piece)[-max(template.longest - 1, 0) :] if template.longest > 1 else b""
            return
        place, rest = found
        self._tail = b""
        stage = template.behind_after if self._stage is Stage.BEFORE else Stage.TAG
        before, self._entered, self._stage = self._stage, stage, stage
        if stage is Stage.FREE:
            self._read(rest)
            return
        self._matcher, self._is_own = template.matcher(stage, place), False
        self._place, self._rest, self._matched, self._read_ids = place, rest, 0, None
        rest = read_text(self._matcher, template.vocabulary, rest)
        matcher = self._renewed() if self._matcher.is_error() else self._matcher
        if rest and before is Stage.FREE:
            self._leave(rest)
        elif matcher.is_stopped():
            self._end_match(template.ends_lazily[stage])

    @property
    def _known(self) -> Template:
        assert self._template is not None
        return self._template

    def _renewed(self) -> LLMatcher:
        """The matcher anew, where its lexer has reached a limit: what other answers have come by is not counted.

        Raises ProcessorError where this answer alone reaches it.
        """
        assert self._matcher is not None
        self._known.is_worn = True
        entered = Stage.GRAMMAR if self._entered is Stage.GRAMMAR else Stage.TAG
        matcher = None if self._is_own else self._known.own_matcher(entered, self._place)
        if matcher is None:
            raise self._failed(self._matcher)
        read_text(matcher, self._known.vocabulary, self._rest)
        if matcher.is_error() or not all(matcher.consume_token(token) for token in self._tokens_read()):
            raise self._failed(matcher)
        self._matcher, self._is_own = matcher, True
        return matcher

    def _tokens_read(self) -> list[int]:
        tokens, read = [], self._read_ids
        while read is not None:
            read, token = read
            tokens.append(token)
        return tokens[::-1]

    def _failed(self, matcher: LLMatcher) -> ProcessorError:
        return ProcessorError(Failure(f"structured_outputs: {told(matcher)}", by_caller=True))

    # -- what is certain ------------------------------------------------------------------------------------------

    def follow(self, token_ids: Sequence[int], output_ids: Sequence[int]) -> Following | None:
        """As the base class has it."""
        if self._stage is Stage.ENDED:
            return Following((), True)
        if self._matcher is None:
            text = b"".join(map(self._known.vocabulary.bytes_of, token_ids))
            if self._stage is not Stage.OPENING and self._known.find(self._stage, self._tail, text) is None:
                return None
        elif token_ids[0] in self._stop_ids:
            return None
        other = self.fork()
        other.advance(token_ids)
        return other._certain()

    def _certain(self) -> Following | None:
        """Go on as far as there is one way only."""
        tokens: list[int] = []
        vocabulary = self._known.vocabulary
        while self._stage.matches and self._matcher is not None and len(tokens) < _MOST_FORCED:
            forced = self._matcher.compute_ff_tokens()[: _MOST_FORCED - len(tokens)]
            if not forced or not vocabulary.are_allowed(forced):
                break
            tokens += forced
            self.advance(forced)
        if self._stage is Stage.ENDED:
            return Following((*tokens, vocabulary.eos_ids[0]), True)
        return Following(tuple(tokens), False) if tokens else None

    # -- masks ----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """In free text, where nothing that is looked for may begin badly."""
        return self._matcher is None and self._stage is not Stage.ENDED and self._bans() is None

    @property
    def _masks(self) -> bool:
        """Whether the next token is one that the grammar allows."""
        matcher = self._matcher
        if matcher is None or not self._stage.matches:
            return False
        return not (self._known.ends_lazily[self._stage] and matcher.is_accepting())

    def _bans(self) -> Ids | None:
        stage = Stage.FREE if self._stage.matches or self._stage is Stage.OPENING else self._stage
        return self._known.banned(stage, self._tail)

    @classmethod
    def begin(cls, processors: Sequence[Self]) -> None:
        """As the base class has it: the masks of all."""
        together: dict[int, list[Self]] = {}
        for one in processors:
            one.settle()
            if one._mask is None and one._masks:
                together.setdefault(id(one._known.vocabulary), []).append(one)
        for members in together.values():
            matchers = [one._matcher for one in members if one._matcher is not None]
            work = _Work(masks.start(matchers, members[0]._known.vocabulary.allowed))
            for place, one in enumerate(members):
                one._work = work, place

    def settle(self) -> None:
        """Wait until nobody else uses the matcher."""
        if self._work is not None:
            (work, place), self._work = self._work, None
            self._mask = work.row(place)

    def fill(self) -> Words | None:
        """The mask of the next token, where there is one: computed now, unless it was before."""
        if self._mask is None and self._masks and self._matcher is not None:
            self._mask = masks.fill([self._matcher], self._known.vocabulary.allowed)[0]
        return self._mask

    def apply(self, logits: Row, output_ids: Sequence[int]) -> None:
        """As the base class has it."""
        logits[:] = self.changed(logits, output_ids)

    def changed(self, logits: Row, output_ids: Sequence[int]) -> Row:
        """As the base class has it: -inf for what may not come. Raises ProcessorError."""
        self.settle()
        if self._stage is Stage.ENDED:
            return _only(logits, np.array(sorted(self._stop_ids or self._known.vocabulary.eos_ids), np.int64))
        if not self._masks:
            changed = logits.copy()
            bans = self._bans()
            if bans is not None:
                changed[bans] = -math.inf
            return changed
        matcher, vocabulary = self._matcher, self._known.vocabulary
        assert matcher is not None
        mask = self.fill()
        if matcher.is_error():
            self._mask, matcher = None, self._renewed()
            mask = self.fill()
            if matcher.is_error():
                raise self._failed(matcher)
        assert mask is not None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits))
        if matcher.is_accepting():
            bits[list(vocabulary.eos_ids)] = 0
            bits[list(self._stop_ids)] = 1
        return np.where(bits.view(np.bool_), logits, np.float32(-math.inf))


def _only(logits: Row, ids: Ids) -> Row:
    changed = np.full_like(logits, -math.inf)
    changed[ids] = logits[ids]
    return changed


def _elsewhere(
    kind: type[TokenConstraint], constraint: CompiledConstraint, digest: bytes, stop_ids: frozenset[int]
) -> TokenConstraint:
    """What was sent, in another process."""
    return kind(grammars_of(digest).prepared(constraint), stop_ids)
