"""What the sampler must know of a sequence: what is sent to the executor, and what it makes of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.sampling.logits_processors.base import LogitsProcessor, Row
from quire.platform.sampling.logits_processors.chain import (
    Chain,
    Link,
    ProcessorError,
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
    prepares: the processors that get ready for a step together with those of other sequences.
    """

    __slots__ = ("_chain", "_check", "_failure", "_read", "_readers", "_until", "input", "output_ids", "prepares")

    def __init__(self, sampling: SamplingInput, output_ids: Sequence[int] = ()) -> None:
        self.input = sampling
        self.output_ids = output_ids
        ends = [link.processor.until for link in sampling.processors]
        self._until = math.inf if None in ends else max((end for end in ends if end is not None), default=0)
        self._check = any(link.check for link in sampling.processors)
        self._restart()

    def _restart(self) -> None:
        self._read = 0
        self._failure: Failure | None = None
        self._chain: Chain = ()
        try:
            self._chain = tuple(link.fork() for link in self.input.processors)
        except ProcessorError as error:
            self._failure = error.failure
        self._readers = [link for link in self._chain if _overrides(type(link.processor), "advance")]
        self.prepares = [link for link in self._chain if _overrides(type(link.processor), "prepare")]

    @property
    def is_plain(self) -> bool:
        """Nothing is done to the next row."""
        return len(self.output_ids) >= self._until

    @property
    def plugins(self) -> list[str]:
        """The names of the processors that are not quire's own."""
        return [link.plugin for link in self.input.processors if link.plugin is not None]

    def read(self) -> None:
        """Tell the processors of the tokens that are new."""
        length = len(self.output_ids)
        if length < self._read:  # a sequence that goes back
            self._restart()
        if length > self._read and self._failure is None:
            new = self.output_ids[self._read :]
            try:
                for link in self._readers:
                    link.advance(new)
            except ProcessorError as error:
                self.fail(error.failure)
        self._read = length

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


def _overrides(kind: type, method: str) -> bool:
    """Whether a class derived from LogitsProcessor has a method of its own."""
    return any(method in vars(one) for one in kind.__mro__ if one not in (LogitsProcessor, object))
