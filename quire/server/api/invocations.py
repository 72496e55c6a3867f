"""POST /invocations, by which Amazon SageMaker calls any model: the body's shape says which route it is for."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from quire.server.api.body import JsonRoute
from quire.server.api.chat import chat_completions
from quire.server.api.completions import completions
from quire.server.api.errors import ApiError
from quire.server.api.schemas import Body, ChatRequest, CompletionRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/invocations")
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """`messages`: /v1/chat/completions; `prompt`: /v1/completions. As these answer."""
    if "messages" in body:
        return await chat_completions(await _checked(ChatRequest, body), request)
    if "prompt" in body:
        return await completions(await _checked(CompletionRequest, body), request)
    raise ApiError(400, "messages: give messages for a chat, or a prompt to be continued.", "messages")


async def _checked(kind: type[Body], body: dict[str, Any]) -> Body:
    """As FastAPI checks the body of a route that has this one. Raises RequestValidationError."""
    try:
        return await asyncio.to_thread(kind.model_validate, body)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise RequestValidationError(faults) from None
