"""A response of /v1/responses: in one piece, as events, in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import OverloadedError
from quire.lora import LoRARequest
from quire.platform.engine.output_stream import Outputs
from quire.platform.outputs.messages.message import ReasoningDelta
from quire.platform.outputs.outputs import CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext, note, note_ignored
from quire.server.response_store import StoredResponse
from quire.server.responses.builder import Read, Stream
from quire.server.responses.errors import ApiError, Json, as_api_error, as_json
from quire.server.responses.logprobs import chat_logprobs
from quire.server.responses.message_builder import ChoiceUpdate, MessageResponseBuilder
from quire.server.responses.responses_items import Event, OutputItems
from quire.server.responses.token_texts import ContentTokens, TokenTexts
from quire.server.schemas.responses.call import ResponsesCall

EVENTS = "text/event-stream"

# How an answer's end is called here, and what the last event then is. Of one that was cancelled OpenAI names no event.
_STATUS = {"length": "incomplete", "abort": "cancelled"}
_LAST = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete", "failed": "failed"}


class ResponsesAnswer(MessageResponseBuilder):
    """One response, and what is kept of it."""

    kind = "resp"
    media_type = EVENTS

    def __init__(self, context: ServerContext, request: Request, call: ResponsesCall) -> None:
        super().__init__(context, request, call.body, call)
        self._id = call.id  # not of the HTTP request's name: whoever knew that could ask for the response
        self._ids = context.engine.unique_ids(self._id, 1)
        self._asked = call
        self._items = OutputItems(call.name)
        self._created = int(time.time())
        self._completed: int | None = None
        self._status = "queued" if call.given.background else "in_progress"
        self._error: dict[str, Any] | None = None
        self._events = 0  # that were numbered
        self._closing: list[Event] = []  # what the answer's end tells
        self._stored: StoredResponse | None = None
        self._tokens = None if call.options.logprobs is None else TokenTexts(self._tokenizer, call.shown)
        self._content = ContentTokens()
        self._shows_reasoning = call.body.include_reasoning is not False
        self._task: asyncio.Task[None] | None = None

    @property
    def _is_over(self) -> bool:
        return self._status not in ("queued", "in_progress")

    # -- its way through the engine -------------------------------------------------------------------------------

    async def _admitted(self, held: ExitStack, read: Read, adapter: LoRARequest | None, sequences: int) -> Outputs:
        outputs = await super()._admitted(held, read, adapter, sequences)
        held.callback(self._leave)
        if self._asked.store:
            self._keep()
        return outputs

    def _keep(self) -> None:
        call = self._asked
        again: list[bytes] | None = [] if call.given.background and call.given.stream else None
        stored = StoredResponse(
            call.id, call.owner, call.given.previous_response_id, call.items, running=self, events=again
        )
        try:
            self._context.responses.begin(stored)
            self._stored = stored
        except (ApiError, OverloadedError) as error:
            if call.given.store or call.given.background or getattr(error, "param", None) == "request_id":
                raise
            note_ignored(self._request, ["store"])  # which is OpenAI's default: nobody asked for it

    def _leave(self) -> None:
        """The client has gone, or a fault has ended it before there was an answer."""
        if self._stored is not None and not self._is_over:
            self._status = "failed"
            self._context.responses.forget(self._stored)

    async def run_in_background(self, read: Read, adapter: LoRARequest | None) -> Response:
        """Queue it, and answer at once, with the response as it is, or with its events as they come."""
        with ExitStack() as held:
            outputs = await self._admitted(held, read, adapter, 1)
            kept = held.pop_all()
        stored = self._stored
        assert stored is not None
        self._record(self._numbered([self._lifecycle("created"), self._lifecycle("queued")]))
        self._task = asyncio.ensure_future(self._work(kept, outputs))
        if self._asked.given.stream:
            return Stream(replayed(stored, 0), ExitStack(), EVENTS)
        return Json(self.snapshot())

    async def _work(self, kept: ExitStack, outputs: Outputs) -> None:
        assert self._stored is not None
        with kept:
            try:
                first = await self._next(outputs)
                async for part in self._parts(first, outputs):
                    self._record([part])
            except Exception as error:  # before there was anything: `_parts` tells of all others
                self._record(self.failed(as_api_error(error, self._fields)))
            finally:
                self._context.responses.complete(self._stored)

    def _record(self, parts: list[bytes]) -> None:
        """Keep what a stream has, event by event."""
        stored = self._stored
        if stored is None or stored.events is None:
            return
        for event in b"".join(parts).split(b"\n\n")[:-1]:
            if not self._context.responses.append(stored, event + b"\n\n"):
                self._context.responses.drop_events(stored)
                self._stop("failed", ApiError(507, "its events take more than may be kept (--response-store-bytes)"))
                return

    # -- in one piece ---------------------------------------------------------------------------------------------

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        (output,) = outputs.values()
        assert isinstance(output, RequestOutput)
        self._take(output)
        note(self._request, **self._usage.for_log())
        return self.snapshot()

    def _take(self, output: RequestOutput) -> list[Event]:
        """What an output adds. With the last one it is over."""
        if self._is_over:
            return []
        events: list[Event] = []
        for piece in [output] if self._tokens is None else self._tokens.cut(output):
            for update in self.updates(piece):
                logprobs, deltas = self._logprobs(update), update.deltas
                if not self._shows_reasoning:
                    deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
                events += self._items.write(deltas, logprobs)
                if update.finish_reason is not None:
                    self._end(_STATUS.get(update.finish_reason, "completed"))
        return events

    def _logprobs(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """Of the tokens that content is made of."""
        options = self._asked.options
        if options.logprobs is None:
            return []
        completion = update.completion
        as_ids = bool(self._asked.body.return_tokens_as_token_ids)
        told = chat_logprobs(completion, options.logprobs, as_ids)
        content = told["content"] if told is not None else []
        return self._content.of(completion.text, content, update.deltas, update.finish_reason is not None)

    def snapshot(self) -> dict[str, Any]:
        """The response as it is now."""
        given, options, chat = self._asked.given, self._asked.options, self._asked.body
        defaults = self._context.config.default_sampling
        reasoning = given.reasoning or {}
        cut_off = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": bool(given.background),
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": None,
            "metadata": given.metadata or {},
            "model": self._context.served.name_of(given.model),
            "output": self._items.items(),
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": given.safety_identifier,
            "service_tier": "default",
            "store": self._stored is not None and self._stored.kept,
            "temperature": _first(given.temperature, defaults.get("temperature"), 1.0),
            "text": {"format": {"type": "text"}, "verbosity": "medium", **_given(given.text)},
            "tool_choice": options.tool_choice,
            "tools": options.tools,
            "top_logprobs": options.logprobs or 0,
            "top_p": _first(given.top_p, defaults.get("top_p"), 1.0),
            "truncation": "disabled",
            "usage": self._counted() if self._is_over else None,
            "user": given.user,
        }

    def _counted(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt,
            # What is written to the prefix cache costs nothing and is not counted.
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
            "total_tokens": usage.prompt + usage.completion,
        }

    # -- its end --------------------------------------------------------------------------------------------------

    def _end(self, status: str) -> None:
        self._status = status
        self._closing += self._items.end("completed" if status == "completed" else "incomplete")
        if status == "completed":
            self._completed = int(time.time())
        if self._stored is not None:
            self._context.responses.finish(self._stored, as_json(self.snapshot()))

    def cancel(self) -> None:
        self._stop("cancelled", None)

    def _stop(self, status: str, error: ApiError | None) -> None:
        """End it before the engine does."""
        if self._is_over:
            return
        self._error = None if error is None else _error(error)
        self._end(status)
        nothing = CompletionOutput(0, "", [], finish_reason="abort")
        self._context.engine.end([RequestOutput(self._ids[0], None, [], [nothing], True)])

    # -- streamed -------------------------------------------------------------------------------------------------

    def parts(self, output: RequestOutput) -> list[bytes]:
        opening = [] if self._events else [self._lifecycle("created")]
        if self._status == "queued" or (opening and not self._is_over):
            self._status = "in_progress"
            opening.append(self._lifecycle("in_progress"))
        return self._numbered([*opening, *self._take(output)])

    def last_parts(self) -> list[bytes]:
        note(self._request, **self._usage.for_log())
        closing, self._closing = self._closing, []
        return self._numbered([*closing, self._lifecycle(_LAST[self._status])])

    def failed(self, error: ApiError) -> list[bytes]:
        if not self._is_over:
            self._error = _error(error)
            self._end("failed")
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        closing, self._closing = self._closing, []
        return self._numbered([*closing, told, self._lifecycle("failed")])

    def _lifecycle(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.snapshot()}

    def _numbered(self, events: list[Event]) -> list[bytes]:
        made = []
        for event in events:
            data = as_json({**event, "sequence_number": self._events})
            made.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._events += 1
        return made


async def replayed(stored: StoredResponse, place: int) -> AsyncGenerator[bytes, None]:
    """The events of a response from this one on, as they come; the last of them ends it."""
    while stored.events is not None:
        if place < len(stored.events):
            first, place = place, len(stored.events)
            yield b"".join(stored.events[first:])
        elif stored.complete:
            return
        else:
            await stored.more()


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": error.message}


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _given(values: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (values or {}).items() if value is not None}
