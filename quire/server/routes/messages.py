"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from quire.platform.engine.async_engine import EngineRequest
from quire.platform.outputs.outputs import RequestOutput
from quire.platform.sampling.params import SamplingParams
from quire.server.context import ServerContext, context_of, new_id, note, note_ignored
from quire.server.responses.anthropic_answer import MessagesAnswer
from quire.server.responses.builder import adapter_of, unless_gone
from quire.server.responses.errors import ApiError, as_api_error
from quire.server.schemas.body import JsonRoute, on_worker
from quire.server.schemas.openai import ChatRequest

if TYPE_CHECKING:
    from quire.server.schemas.anthropic.call import MessagesBody, MessagesCall

router = APIRouter(route_class=JsonRoute)

_EITHER: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


class TokenCount(BaseModel):
    """How many tokens a prompt has, those of its images among them."""

    input_tokens: int


# Their bodies are typed by the `anthropic` package, which takes a second to import: when the first of them comes.


def _read_messages(given: dict[str, Any], lenient: bool) -> MessagesBody:
    from quire.server.schemas.anthropic.call import read_messages

    return read_messages(given, lenient)


def _read_count(given: dict[str, Any], lenient: bool) -> MessagesBody:
    from quire.server.schemas.anthropic.call import read_count

    return read_count(given, lenient)


def _call(context: ServerContext, request: Request, body: MessagesBody) -> MessagesCall:
    from quire.server.schemas.anthropic.call import MessagesCall

    return MessagesCall(context, request, body)


def _about(error: Exception, body: MessagesBody, call: MessagesCall | None) -> ApiError:
    from quire.server.schemas.anthropic.call import about_messages

    return about_messages(as_api_error(error, list(ChatRequest.model_fields)), body, call)


@router.post("/v1/messages", responses=_EITHER)
async def messages(body: dict[str, Any], request: Request) -> Response:
    """Answer a conversation, pictures in it included."""
    context = context_of(request)
    read = await on_worker(_read_messages, body, context.config.unknown_fields == "warn")
    note_ignored(request, read.ignored)
    adapter = await adapter_of(context, request, read.chat.model)
    note(request, model=context.served.name_of(read.chat.model), user=read.chat.user)
    call: MessagesCall | None = None
    try:
        call = _call(context, request, read)
        answer = MessagesAnswer(context, request, read, call)
        return await answer.run(call.read, adapter, call.sequences, bool(read.chat.stream))
    except Exception as error:
        raise _about(error, read, call) from error


@router.post("/v1/messages/count_tokens", responses={200: {"model": TokenCount}})
async def count_tokens(body: dict[str, Any], request: Request) -> JSONResponse:
    """How many tokens the prompt of a conversation has. With images, the prompt is computed: they are looked at."""
    context = context_of(request)
    read = await on_worker(_read_count, body, context.config.unknown_fields == "warn")
    note_ignored(request, read.ignored)
    await adapter_of(context, request, read.chat.model)
    call: MessagesCall | None = None
    try:
        call = _call(context, request, read)
        with context.engine.accepted(), context.admit(1):
            return JSONResponse({"input_tokens": await unless_gone(request, _count(context, request, call))})
    except Exception as error:
        raise _about(error, read, call) from error


async def _count(context: ServerContext, request: Request, call: MessagesCall) -> int:
    """How many tokens an image takes is known once it has been prepared, as for an answer."""
    ((prompt, _),) = await context.engine.on_reader(call.read)
    assert isinstance(prompt, dict)
    if not prompt.get("multi_modal_data"):
        return len(prompt["prompt_token_ids"])
    (name,) = context.engine.unique_ids(new_id("count", request, None), 1)
    async with await context.engine.submit([EngineRequest(name, prompt, SamplingParams(max_tokens=1))]) as outputs:
        async for output in outputs:
            if output.failure is not None and output.failure.by_caller:
                raise ApiError(400, output.failure.message, code=output.failure.code)
            assert isinstance(output, RequestOutput) and output.failure is None
            return len(output.prompt_token_ids)
    raise AssertionError("an engine's request without an output")
