"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from quire.platform.outputs.messages.tool_choice import check_tools
from quire.server.context import ServerContext, context_of
from quire.server.responses.builder import adapter_of
from quire.server.responses.errors import ApiError, Json, as_api_error
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.openai import DetokenizeRequest, TokenizeRequest
from quire.server.schemas.prompts import PromptReader

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> JSONResponse:
    """The token ids of a prompt, or of a conversation after the chat template. An image counts as one token."""
    context = context_of(request)
    await adapter_of(context, request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either a prompt or messages.", "prompt")
    if body.chat_template is not None:
        raise ApiError(400, "chat_template: is never taken from requests.", "chat_template", "unsupported_parameter")
    try:
        with context.engine.accepted(), context.admit(1):
            return JSONResponse(await context.engine.on_reader(_tokenize, context, body))
    except Exception as error:
        raise as_api_error(error, list(TokenizeRequest.model_fields)) from error


def _refuse(body: TokenizeRequest, fields: Sequence[str], why: str) -> None:
    for field in fields:
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field}: {why}.", field)


def _tokenize(context: ServerContext, body: TokenizeRequest) -> dict[str, Any]:
    reader, engine = PromptReader(context), context.engine.llm_engine
    if body.prompt is not None:
        _refuse(body, _OF_MESSAGES, "is for messages")
        tokens = reader.tokens(body.prompt, body.add_special_tokens is not False)
    else:
        if body.add_special_tokens:
            raise ApiError(400, "add_special_tokens: the chat template writes them.", "add_special_tokens")
        tools = check_tools(body.tools)
        tokens = reader.render(body, body.chat_template_kwargs, tools.as_tools() if tools else None).token_ids
    strings = engine.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": engine.limits.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> JSONResponse:
    """The text of token ids."""
    context = context_of(request)
    await adapter_of(context, request, body.model)
    engine = context.engine.llm_engine
    if engine.tokenizer is None:
        raise ApiError(400, "tokens: no tokenizer is loaded.", "tokens")
    if len(body.tokens) > engine.limits.max_model_len:
        most = engine.limits.max_model_len
        raise ApiError(400, f"tokens: are {len(body.tokens)}, and the limit is max_model_len={most}.", "tokens")
    most = max(len(engine.tokenizer), engine.limits.vocab_size)
    wrong = next((token for token in body.tokens if not 0 <= token < most), None)
    if wrong is not None:
        raise ApiError(400, f"tokens: {wrong} is none; token ids are 0 to {most - 1}.", "tokens")
    with context.engine.accepted(), context.admit(1):
        text = await context.engine.on_reader(engine.tokenizer.decode, body.tokens)
    return Json({"prompt": text})
