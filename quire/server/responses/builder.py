"""From the engine's outputs to an HTTP answer: collected or streamed, given up when the client goes away."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire import __version__
from quire.lora import LoRARequest
from quire.platform.engine.async_engine import EngineRequest
from quire.platform.engine.output_stream import Outputs
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.beams import beams_as_output
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext, new_id, note
from quire.server.http.gone import ClientGoneError, while_there
from quire.server.responses.errors import ApiError, Json, as_api_error, remember
from quire.server.schemas.sampling import Params, stream_options

_T = TypeVar("_T")

logger = logging.getLogger("quire.server")

_DONE = b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do some work while the client is there; cancelled, and ClientGoneError raised, as soon as it is not."""
    return await while_there(request.scope, request.receive, work)


async def adapter_of(context: ServerContext, request: Request, model: str | None) -> LoRARequest | None:
    """What a request runs with that names this model; an adapter may be loaded for it. Raises ApiError 404."""
    if context.served.gate is not None:
        await unless_gone(request, context.served.pass_gate(model))
    try:
        return context.served.find(model)
    except ApiError:
        with context.engine.accepted(), context.admit(1):
            return await unless_gone(request, context.served.resolve(model))


class Stream(Response):
    """Parts of an answer; the client's leaving closes the generator at once. held: what is closed in any case."""

    def __init__(self, events: AsyncGenerator[bytes, None], held: ExitStack, media_type: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(scope, receive, self._send(send))
        except ClientGoneError:
            pass
        except Exception as error:
            logger.error("a stream broke off", exc_info=error)
        finally:
            await self._events.aclose()
            self._held.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# json.dumps makes an encoder for each call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_TEXT, _IDS = "\0text", ["\0ids"]  # that stand in an event's pattern for what changes


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encode(data).encode("utf-8", "replace")


# Called on a worker, once a request has its place in the queue: its prompts, and what each is to be answered with.
Read = Callable[[], Sequence[tuple[PromptType, Params]]]


class ResponseBuilder(ABC):
    """One HTTP request's way through the engine. Each route says what its answers and their parts look like."""

    kind: str  # of the answer's id
    media_type: str  # of a stream
    cumulative = False  # whether each part of a stream stands for all before it

    def __init__(self, context: ServerContext, request: Request, body: Any, prompts: int) -> None:
        """prompts: their number."""
        self._context = context
        self._request = request
        self._body = body
        self._fields = list(type(body).model_fields)
        self._tokenizer = context.engine.llm_engine.tokenizer
        self._n = body.n or 1
        self._usage = Usage()
        self._id = new_id(self.kind, request, getattr(body, "request_id", None))
        self._ids = context.engine.unique_ids(self._id, prompts)

    @abstractmethod
    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        """The body of an answer in one piece; outputs: by request id."""

    @abstractmethod
    def parts(self, output: RequestOutput) -> list[bytes]:
        """What a stream has of an output."""

    @abstractmethod
    def last_parts(self) -> list[bytes]:
        """What a stream has after all outputs."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[bytes]:
        """How a stream ends that has begun and cannot go on."""

    def prompt_text(self, output: Output) -> str:
        """The prompt as it was given, or its tokens' text."""
        text = output.prompt if isinstance(output, RequestOutput) else None
        return text if text is not None else str(self._tokenizer.decode(list(output.prompt_token_ids)))

    def beams(self, output: BeamSearchOutput) -> list[CompletionOutput]:
        """A beam search's sequences without the prompt, best first."""
        found = beams_as_output(self._tokenizer, output).outputs
        return [replace(one, cumulative_logprob=None, logprobs=None) for one in found]  # which were not asked for

    async def run(self, read: Read, adapter: LoRARequest | None, sequences: int, stream: bool) -> Response:
        """Answer; until the first output a fault has its own status, afterwards it is a part of the stream."""
        with ExitStack() as held:  # handed over to the stream, if there is one
            outputs = await self._admitted(held, read, adapter, sequences)
            if not stream:
                ended = await unless_gone(self._request, self._collect(outputs))
                return Json(self.whole(ended))
            first = await unless_gone(self._request, self._next(outputs))
            return Stream(self._parts(first, outputs), held.pop_all(), self.media_type)

    async def begin(
        self, read: Read, adapter: LoRARequest | None, sequences: int
    ) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
        """Queue it as `run` does, whose faults these are. What is returned is to be called once: it waits for the
        answer's body, whether the client is there or not.
        """
        with ExitStack() as held:
            outputs = await self._admitted(held, read, adapter, sequences)
            kept = held.pop_all()

        async def rest() -> dict[str, Any]:
            with kept:
                return self.whole(await self._collect(outputs))

        return rest

    async def _admitted(self, held: ExitStack, read: Read, adapter: LoRARequest | None, sequences: int) -> Outputs:
        held.enter_context(self._context.engine.accepted())
        held.enter_context(self._context.admit(sequences))
        outputs = await unless_gone(self._request, self._begin(read, adapter))
        held.callback(lambda: self._context.metrics.aborted(outputs.close()))
        return outputs

    async def _begin(self, read: Read, adapter: LoRARequest | None) -> Outputs:
        engine = self._context.engine
        made = await engine.on_reader(read)
        named = zip(self._ids, made, strict=True)
        requests = [EngineRequest(name, prompt, params, adapter) for name, (prompt, params) in named]
        return await engine.submit(requests)

    async def _collect(self, outputs: Outputs) -> dict[str, Output]:
        return {output.request_id: self._checked(output) async for output in outputs}

    async def _next(self, outputs: Outputs) -> Output:
        first = await anext(outputs)
        goes_on = isinstance(first, RequestOutput) and any(one.finish_reason != "error" for one in first.outputs)
        return first if goes_on else self._checked(first)

    async def _parts(self, first: Output, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """A choice that fails ends the stream when the others have ended: what they say does not depend on when."""
        made: list[bytes] = []
        failed: RequestOutput | None = None
        try:
            output: Output | None = first
            while isinstance(output, RequestOutput):
                if output.failure is not None:
                    failed = output
                    output = replace(output, outputs=[one for one in output.outputs if one.finish_reason != "error"])
                parts = self.parts(output) if output.outputs else []
                made = parts if self.cumulative and parts else made + parts
                if made and not outputs.ready:  # else this stream is behind: the next go with these
                    yield b"".join(made)
                    made = []
                output = await anext(outputs, None)
            for last in (failed, output):
                if last is not None:
                    self._checked(last)
            yield b"".join([*made, *self.last_parts()])
        except Exception as error:
            told = as_api_error(error, self._fields)
            remember(self._request.scope, told)
            yield b"".join([*made, *self.failed(told)])

    def _checked(self, output: Output) -> Output:
        failure = output.failure
        if failure is None:
            return output
        if failure.by_caller:
            raise ApiError(400, failure.message, code=failure.code)
        note(self._request, error=failure.message)
        raise ApiError(500, "the engine could not compute this request; the server's log has it under its id")


class EventResponseBuilder(ResponseBuilder):
    """An answer as OpenAI has it, streamed as server-sent events. Each route says what its chunks look like."""

    media_type = "text/event-stream"
    objects: tuple[str, str]  # what OpenAI calls an answer, and a chunk of it

    def __init__(self, context: ServerContext, request: Request, body: Any, prompts: int) -> None:
        self._usage_last, self._usage_each = stream_options(body)
        super().__init__(context, request, body, prompts)
        self._head = {
            "id": self._id,
            "object": self.objects[bool(body.stream)],
            "created": int(time.time()),
            "model": context.served.name_of(body.model),
            "system_fingerprint": f"quire-{__version__}",
        }
        self._begin_event = b"data: %b," % _encode(self._head)[:-1].encode("utf-8", "replace")

    @abstractmethod
    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events that an output makes, as `chunk` has them."""

    def chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        """What an event has beside what all of an answer begin with. Where usage was asked for, those without it have
        null."""
        if not (self._usage_last or self._usage_each):
            return {"choices": choices}
        return {"choices": choices, "usage": self._usage.as_dict() if with_usage else None}

    def parts(self, output: RequestOutput) -> list[bytes]:
        return list(map(self._event, self.chunks(output)))

    def _event(self, chunk: dict[str, Any]) -> bytes:
        """`event` of a chunk behind what all of an answer begin with, which is encoded once."""
        return b"%b%b\n\n" % (self._begin_event, _encode(chunk)[1:].encode("utf-8", "replace"))

    def pattern(self, choice: Callable[[str, list[Any]], dict[str, Any]]) -> Callable[[str, Sequence[int]], bytes]:
        """Makes events of one choice, of which nothing but the text and the token ids change; the rest is encoded once.

        choice: makes one of a text and token ids, of which it need not have the ids.
        """
        whole = self._event(self.chunk([choice(_TEXT, _IDS)], False)).decode()
        before, _, after = whole.partition(_encode(_TEXT))
        between, ids, after = after.partition(_encode(_IDS))

        def made(text: str, token_ids: Sequence[int]) -> bytes:
            told = str(list(token_ids)).replace(" ", "") if ids else ""
            return f"{before}{encode_basestring(text)}{between}{told}{after}".encode("utf-8", "replace")

        return made

    def last_parts(self) -> list[bytes]:
        note(self._request, **self._usage.for_log())
        return [*([self._event(self.chunk([], True))] if self._usage_last else []), _DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error.body), _DONE]


@dataclass
class Usage:
    """Tokens of one HTTP request, added up as outputs come. reasoning: None where the model does not reason."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int | None = None
    _seen: set[str] = field(default_factory=set)

    def count(self, output: Output) -> None:
        prompt = len(output.prompt_token_ids)
        if output.request_id not in self._seen:
            self._seen.add(output.request_id)
            self.prompt += prompt
            self.cached += (isinstance(output, RequestOutput) and output.num_cached_tokens) or 0
        if isinstance(output, BeamSearchOutput):
            self.completion += sum(len(beam.tokens) - prompt for beam in output.sequences)
        else:
            self.completion += sum(len(completion.token_ids) for completion in output.outputs)

    def for_log(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt, "cached_tokens": self.cached, "completion_tokens": self.completion}

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            told["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return told


def best(outputs: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n of highest mean logprob, best first, where there are more than n."""
    if len(outputs) <= n:
        return list(outputs)
    return sorted(outputs, key=lambda o: -(o.cumulative_logprob or 0.0) / max(1, len(o.token_ids)))[:n]
