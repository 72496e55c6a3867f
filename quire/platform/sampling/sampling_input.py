"""What the sampler must know of a sequence: what is sent to the executor, and what it makes of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.sampling.logits_processors.base import LogitsProcessor, Row
from quire.platform.sampling.logits_processors.chain import Chain, ProcessorError, check_alone
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
    """

    __slots__ = ("_chain", "_failure", "_read", "_readers", "_until", "input", "kinds", "output_ids")

    def __init__(self, sampling: SamplingInput, output_ids: Sequence[int] = ()) -> None:
        self.input = sampling
        self.output_ids = output_ids
        # Rows of sequences with the same kinds of processors can be changed together.
        self.kinds = tuple(type(link.processor) for link in sampling.processors)
        ends = [link.processor.until for link in sampling.processors]
        self._until = math.inf if None in ends else max((end for end in ends if end is not None), default=0)
        self._failure: Failure | None = None
        self._restart()

    def _restart(self) -> None:
        self._read = 0
        self._chain: Chain = ()
        try:
            self._chain = tuple(link.fork() for link in self.input.processors)
        except ProcessorError as error:
            self._failure = error.failure
        self._readers = [link for link in self._chain if type(link.processor).advance is not LogitsProcessor.advance]

    @property
    def is_plain(self) -> bool:
        """Nothing is done to the next row."""
        return len(self.output_ids) >= self._until

    @property
    def plugins(self) -> list[str]:
        """The names of the processors that are not quire's own."""
        return [link.plugin for link in self.input.processors if link.plugin is not None]

    def read(self) -> Chain | Failure:
        """The processors, once they have been told of all tokens."""
        if len(self.output_ids) < self._read:  # a sequence that goes back
            self._restart()
        new = self.output_ids[self._read :]
        if len(new) and self._failure is None:
            try:
                for link in self._readers:
                    link.advance(new)
            except ProcessorError as error:
                self._failure = error.failure
            self._read += len(new)
        return self._chain if self._failure is None else self._failure

    def checked(self, table: Row, row: int, changed: Row | Failure) -> Row | Failure:
        """The changed row of a table, or in a debug run why it is not what it should be."""
        if not any(link.check for link in self._chain):
            return changed
        return check_alone(self.input.processors, self._chain, table, row, self.output_ids, changed)
