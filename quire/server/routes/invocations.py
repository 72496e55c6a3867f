"""POST /invocations, by which Amazon SageMaker calls any model: the body's shape says which route it is for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.responses.errors import ApiError
from quire.server.routes.chat import chat_completions
from quire.server.routes.completions import completions
from quire.server.schemas.body import JsonRoute, checked
from quire.server.schemas.openai import ChatRequest, CompletionRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/invocations")
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """`messages`: /v1/chat/completions; `prompt`: /v1/completions. As these answer."""
    given = {name: value for name, value in body.items() if value is not None or name not in ("messages", "prompt")}
    if "messages" in given:
        return await chat_completions(await checked(given, ChatRequest), request)
    if "prompt" in given:
        return await completions(await checked(given, CompletionRequest), request)
    raise ApiError(400, "messages: give messages for a chat, or a prompt to be continued.", "messages")
