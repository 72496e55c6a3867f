"""What the sampler must know of a sequence: what is sent to the executor, and what it makes of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.sampling.logits_processors.base import Following, LogitsProcessor, ProcessorError, Row
from quire.platform.sampling.logits_processors.chain import (
    Chain,
    Link,
    changed_row,
    check_alone,
    prepare,
)
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """How a request's tokens are drawn. Data that pickles: it goes to the executor with a sequence's first chunk.

    processors: what changes its logits, in the state before the first token; empty: nothing does.
    """

    params: SamplingParams
    processors: Chain = ()


class SamplingState:
    """One sequence's sampling, on the executor's side: its processors, and how far they have read its tokens.

    input: the request's. output_ids: what the sequence has generated so far, a list that grows; its length is the
    position of the next draw. Made anew from these two, it goes on as if it had been there from the beginning.
    prepares: the processors that get ready for a step together with those of other sequences. shapes: those that know
    what must follow a token: they want to be told of each before the next step. takes_likeliest: where nothing is done
    to a row, there is no more to say of the next token than that it is the row's likeliest.
    """

    __slots__ = (
        "_chain",
        "_check",
        "_failure",
        "_forbids_until",
        "_idlers",
        "_read",
        "_readers",
        "_until",
        "input",
        "output_ids",
        "prepares",
        "shapes",
        "takes_likeliest",
    )

    def __init__(self, sampling: SamplingInput, output_ids: Sequence[int] = ()) -> None:
        self.input = sampling
        self.output_ids = output_ids
        chain = sampling.processors
        idlers = [link for link in chain if _overrides(type(link.processor), "idle")]
        self._until = _last_end([link for link in chain if link not in idlers])
        self._forbids_until = _last_end([link for link in chain if link not in idlers and link.processor.forbids])
        self._check = any(link.check for link in chain)
        self._restart()

    def _restart(self) -> None:
        self._read = 0
        self._failure: Failure | None = None
        self._chain: Chain = ()
        try:
            self._chain = tuple(link.fork() for link in self.input.processors)
        except ProcessorError as error:
            self._failure = error.failure
        self._collect()

    def _collect(self) -> None:
        """Who of the chain does what."""
        chain = self._chain
        self._readers = [link for link in chain if _overrides(type(link.processor), "advance")]
        self.prepares = [link for link in chain if _overrides(type(link.processor), "prepare")]
        self._idlers = [link for link in chain if _overrides(type(link.processor), "idle")]
        self.shapes = [link for link in chain if _overrides(type(link.processor), "follow")]
        params = self.input.params
        self.takes_likeliest = params.greedy and params.logprobs is None and not self.shapes

    def fork(self, output_ids: Sequence[int]) -> SamplingState:
        """Of another sequence of the request. output_ids: its tokens, the first of this one's or all."""
        other = object.__new__(SamplingState)
        for name in ("_check", "_failure", "_forbids_until", "_read", "_until", "input"):
            setattr(other, name, getattr(self, name))
        other.output_ids = output_ids
        other._chain = ()
        try:
            other._chain = tuple(link.fork() for link in self._chain)
        except ProcessorError as error:
            other._failure = error.failure
        other._collect()
        return other

    @property
    def is_plain(self) -> bool:
        """Nothing is done to the next row."""
        if len(self.output_ids) < self._until:
            return False
        if not self._idlers:
            return True
        self.read()
        return self._failure is None and all(link.processor.idle for link in self._idlers)

    @property
    def stays_plain(self) -> bool:
        """Nothing is done to the next row, nor to any after it."""
        return not self._idlers and len(self.output_ids) >= self._until

    @property
    def failed(self) -> bool:
        """It yields no more rows."""
        return self._failure is not None

    @property
    def plugins(self) -> list[str]:
        """The names of the processors that are not quire's own."""
        return [link.plugin for link in self.input.processors if link.plugin is not None]

    def read(self) -> None:
        """Tell the processors of the tokens that are new."""
        length = len(self.output_ids)
        if length < self._read:
            self._go_back(self._read - length)
        if length > self._read and self._failure is None:
            new = self.output_ids[self._read :]
            try:
                for link in self._readers:
                    link.advance(new)
            except ProcessorError as error:
                self.fail(error.failure)
        self._read = length

    def _go_back(self, count: int) -> None:
        """The sequence has lost its last tokens."""
        if self._failure is None and all(link.processor.rollback(count) for link in self._readers):
            self._read -= count
        else:
            self._restart()

    def follow(self, token_id: int) -> Following | Failure | None:
        """What must come behind a token that was drawn for it; None: nothing is certain."""
        run, ends, last = [token_id], False, None
        try:
            while not ends and len(run) != last:  # one may go on where another has led
                last = len(run)
                for link in self.shapes:
                    following = link.processor.follow(run, self.output_ids)
                    if following is not None and not ends:
                        run += following.tokens
                        ends = following.ends
                if len(self.shapes) == 1:
                    break
        except ProcessorError as error:
            return error.failure
        if len(run) > 1 and len(self.output_ids) + 1 < self._forbids_until:
            return None  # one of the others may not allow it
        return Following(tuple(run[1:]), ends) if ends or len(run) > 1 else None

    def restricted(self, row: Row) -> Row:
        """The next row within the answer's shape, and otherwise as it was: what logprobs are of."""
        for link in self.shapes:
            if self._failure is None and not link.processor.idle:
                row = link.processor.changed(row, self.output_ids)
        return row

    def fail(self, failure: Failure) -> None:
        """Its rows yield this from now on."""
        self._failure = failure

    def changed(self, row: Row) -> Row | Failure:
        """A changed copy of the next row; or why there is none."""
        if self._readers:
            self.read()
        if self._failure is not None:
            return self._failure
        changed = changed_row(self._chain, row, self.output_ids)
        if self._check:
            changed = check_alone(self.input.processors, row, self.output_ids, changed)
        return changed


def begin_together(states: Sequence[SamplingState]) -> None:
    """Before the model computes a step: let work that can go on beside it begin. The states are distinct."""
    together: dict[type[LogitsProcessor], list[LogitsProcessor]] = {}
    for state in states:
        state.read()
        for link in () if state.failed else state.shapes:
            together.setdefault(type(link.processor), []).append(link.processor)
    for kind, members in together.items():
        kind.begin(members)


def prepare_together(states: Sequence[SamplingState]) -> None:
    """Let the processors of a step's sequences get ready for it, those of a class at once; the states are distinct."""
    together: dict[type, list[tuple[SamplingState, Link]]] = {}
    for state in states:
        state.read()
        for link in state.prepares:
            together.setdefault(type(link.processor), []).append((state, link))
    for members in together.values():
        try:
            prepare([link for _, link in members], [state.output_ids for state, _ in members])
        except ProcessorError:
            for state, link in members:  # one by one, so that only the culprit's request ends
                try:
                    prepare([link], [state.output_ids])
                except ProcessorError as error:
                    state.fail(error.failure)


def _last_end(links: Sequence[Link]) -> float:
    """The number of tokens from which on none of them does anything."""
    ends = [link.processor.until for link in links]
    return math.inf if None in ends else max((end for end in ends if end is not None), default=0)


def _overrides(kind: type, method: str) -> bool:
    """Whether a class derived from LogitsProcessor has a method of its own."""
    return any(method in vars(one) for one in kind.__mro__ if one not in (LogitsProcessor, object))
