"""From the engine's outputs to messages: what each choice says, whole and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import Request

from quire.platform.outputs.messages.message import CallBegin, Delta, Message, MessageParser, ReasoningDelta, collect
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext
from quire.server.responses.builder import ResponseBuilder, best
from quire.server.schemas.chat_options import ChatCall

_WINDOW = 256  # tokens that are looked through at once for the end of reasoning


class ChoiceUpdate(NamedTuple):
    """What is new of a choice.

    completion: the engine's own words: tokens, logprobs, the text as it was generated.  deltas: what they say.
    begins: whether this is the first of the choice.  calls: whether the choice has called a tool so far.
    finish_reason: "stop", "length" or "tool_calls" with the last of the choice; None before it.
    """

    completion: CompletionOutput
    deltas: list[Delta]
    begins: bool
    calls: bool
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice that has ended. completion: as it was generated; finish_reason: as in ChoiceUpdate."""

    completion: CompletionOutput
    message: Message
    finish_reason: str | None


@dataclass(slots=True)
class _Reading:
    """How far a choice has been read. tokens: of the reasoning, and what may belong to it, until it has ended."""

    parser: MessageParser
    calls: bool = False
    ended: bool = False
    thinks: bool = False
    answers: bool = False
    tokens: list[int] = field(default_factory=list)


class MessageResponseBuilder(ResponseBuilder):
    """One conversation's answer. Each route says what messages and their parts look like.

    What it needs of `body` is a ChatRequest's: a route with bodies of its own makes one of them.
    """

    def __init__(self, context: ServerContext, request: Request, body: Any, call: ChatCall) -> None:
        super().__init__(context, request, body, prompts=1)
        self._call = call
        self._readings: dict[int, _Reading] = {}
        self._may_call = call.tools is not None
        if call.format.reasoning is not None:
            self._usage.reasoning = 0

    # -- in one piece ---------------------------------------------------------------------------------------------

    def choices(self, output: Output) -> list[Choice]:
        """The choices of an answer in one piece, best first where there were more than are shown."""
        self._usage.count(output)
        made = self.beams(output) if isinstance(output, BeamSearchOutput) else list(output.outputs)
        read = {one.index: self._choice(one) for one in made}
        return [read[one.index] for one in best(made, self._n)]

    def _choice(self, completion: CompletionOutput) -> Choice:
        reading = self._new_reading(completion.index)
        deltas = self._read(reading, completion)
        return Choice(completion, collect(deltas), self._finish_reason(completion, reading.calls))

    # -- streamed -------------------------------------------------------------------------------------------------

    def updates(self, output: RequestOutput) -> list[ChoiceUpdate]:
        """What an output of a stream brings, of each choice that has not ended before. Text that may yet turn out to
        belong to something else waits: an update may have tokens and no deltas.
        """
        self._usage.count(output)
        made = []
        for completion in output.outputs:
            reading = self._readings.get(completion.index)
            begins = reading is None
            if reading is None:
                reading = self._readings[completion.index] = self._new_reading(completion.index)
            elif reading.ended:
                continue
            deltas = self._read(reading, completion)
            reason = self._finish_reason(completion, reading.calls)
            made.append(ChoiceUpdate(completion, deltas, begins, reading.calls, reason))
        return made

    # -- both -----------------------------------------------------------------------------------------------------

    def _new_reading(self, index: int) -> _Reading:
        return _Reading(self._call.parser(self._ids[0], index))

    def _read(self, reading: _Reading, completion: CompletionOutput) -> list[Delta]:
        """What the new text of a choice says; the last of it, if the choice has ended."""
        deltas = reading.parser.feed(completion.text) if completion.text else []
        if completion.finish_reason is not None:
            deltas = [*deltas, *reading.parser.finish(completion.finish_reason == "length")]
            reading.ended = True
        if self._may_call and not reading.calls:
            reading.calls = any(isinstance(delta, CallBegin) for delta in deltas)
        if self._usage.reasoning is not None and not reading.answers:
            self._usage.reasoning += self._reasoning_tokens(reading, completion, deltas)
        return deltas

    def _reasoning_tokens(self, reading: _Reading, completion: CompletionOutput, deltas: Sequence[Delta]) -> int:
        """How many tokens the reasoning had, its tags among them; told once: when it has ended."""
        before = len(reading.tokens)
        reading.tokens += completion.token_ids
        reading.thinks = reading.thinks or any(isinstance(delta, ReasoningDelta) for delta in deltas)
        reading.answers = reading.ended or any(not isinstance(delta, ReasoningDelta) for delta in deltas)
        if not reading.answers:
            return 0
        tokens, reading.tokens = reading.tokens, []
        if not reading.thinks:
            return 0
        assert self._call.format.reasoning is not None
        end = self._end_of_reasoning(tokens, self._call.format.reasoning.ends)
        if end is not None:
            return end
        return len(tokens) if all(isinstance(delta, ReasoningDelta) for delta in deltas) else before

    def _end_of_reasoning(self, tokens: list[int], ends: Sequence[str]) -> int | None:
        """The number of tokens up to the first of these texts, it included."""
        overlap = 2 * max(map(len, ends))
        for start in range(0, len(tokens), _WINDOW):
            first = max(0, start - overlap)
            if not self._holds(tokens[first : start + _WINDOW], ends):
                continue
            last = start + 1
            while not self._holds(tokens[first:last], ends):
                last += 1
            return last
        return None

    def _holds(self, tokens: list[int], texts: Sequence[str]) -> bool:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        return any(one in text for one in texts)

    def _finish_reason(self, completion: CompletionOutput, calls: bool) -> str | None:
        """As OpenAI has it: a call that the request names ends with "stop", as it was no decision of the model's."""
        tools = self._call.tools
        if not calls or completion.finish_reason != "stop" or tools is None or tools.choice == "named":
            return completion.finish_reason
        return "function_call" if self._call.legacy else "tool_calls"
