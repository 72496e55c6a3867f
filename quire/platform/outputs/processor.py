"""From a request's state to what its caller gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from quire.platform.outputs.beams import BeamMaker
from quire.platform.outputs.completions import CompletionMaker
from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.outputs.pooled import AnyOutput, PooledMaker
from quire.platform.outputs.sequence_text import RequestText
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.sampling.params import RequestOutputKind
from quire.platform.scheduling.request import Request, SequenceState


class OutputMaker(Protocol):
    """Makes one kind of result."""

    def make(self, request: Request, texts: RequestText, finished: bool) -> AnyOutput | None:
        """What a request has to show after a step, which may be nothing. finished: whether the request has."""


class OutputProcessor:
    """Turns what the scheduler knows of a request into what its caller gets.

    It reads requests and changes none. What belongs to text is kept here, from `add` until the last output or
    `discard`, by the request's number of arrival: an id may be used again before the last output of its former bearer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, RequestText] = {}
        self._completions = CompletionMaker(tokenizer)
        self._beams = BeamMaker(tokenizer)
        self._pooled = PooledMaker()

    def add(self, request: Request, stops: StopStrings | None = None) -> None:
        """Expect a request's tokens. stops: its stop strings, prepared, if they have been."""
        beginning = None
        if self.tokenizer is not None and request.params.detokenize:
            beginning = Detokenizer(self.tokenizer, request.prompt_ids, request.params, stops)
        self._texts[request.arrival] = RequestText(beginning)

    def discard(self, request: Request) -> None:
        """Forget a request that has no more outputs."""
        self._texts.pop(request.arrival, None)

    def take(self, sequence: SequenceState) -> str | None:
        """Turn a sequence's new tokens into text. Returns the stop string that the text has reached, if any: the
        scheduler is to end the sequence."""
        texts = self._texts[sequence.request.arrival]
        if texts.is_empty:
            return None
        text = texts.sequences.get(sequence.id) or texts.of(sequence)
        return text.take(sequence)

    def tokens_taken(self, sequence: SequenceState) -> int:
        """How many of a sequence's generated tokens its text is made of."""
        return self._texts[sequence.request.arrival].of(sequence).taken

    def output(self, request: Request, finished: bool) -> AnyOutput | None:
        """The request's output after a step, if it has one to show now. finished: whether the request has; this is its
        last one then."""
        if not finished and request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        texts = self._texts.get(request.arrival) or RequestText()  # it may end before it begins
        maker: OutputMaker = self._completions if request.beam is None else self._beams
        if request.pooling is not None:
            maker = self._pooled
        output = maker.make(request, texts, finished)
        if finished:
            self.discard(request)
        return output

    def check_integrity(self, running: Iterable[Request], failed: Iterable[Request]) -> None:
        """Raise AssertionError unless there is a text of each request that runs, and of no other but those that have
        failed and had no output since."""
        expected = {request.arrival for request in running}
        if not expected <= self._texts.keys():
            raise AssertionError("a request that runs has no text")
        if not self._texts.keys() <= expected.union(request.arrival for request in failed):
            raise AssertionError("a request has ended, and its text is kept")
