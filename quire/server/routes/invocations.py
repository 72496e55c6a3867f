"""POST /invocations, by which Amazon SageMaker calls any model: the body's shape says which route it is for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.pooling_types import PoolingSpec
from quire.server.context import context_of
from quire.server.responses.errors import ApiError
from quire.server.routes.chat import chat_completions
from quire.server.routes.completions import completions
from quire.server.routes.embeddings import classify, embeddings
from quire.server.routes.scores import rerank, score
from quire.server.runners import check_generates
from quire.server.schemas.body import JsonRoute, checked
from quire.server.schemas.openai import ChatRequest, CompletionRequest
from quire.server.schemas.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/invocations")
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """`messages`: /v1/chat/completions; `prompt`: /v1/completions. As these answer. Of a model that pools: `query`:
    /rerank; two sides of texts: /score; else /v1/embeddings, or /classify where it tells classes.
    """
    spec = context_of(request).engine.llm_engine.pooling
    if spec is not None:
        return await _pooled(spec, body, request)
    given = {name: value for name, value in body.items() if value is not None or name not in ("messages", "prompt")}
    if "messages" in given:
        return await chat_completions(await checked(given, ChatRequest), request)
    if "prompt" in given:
        return await completions(await checked(given, CompletionRequest), request)
    raise ApiError(400, "messages: give messages for a chat, or a prompt to be continued.", "messages")


async def _pooled(spec: PoolingSpec, given: dict[str, Any], request: Request) -> Response:
    if given.get("prompt") is not None:
        check_generates(spec)
    if given.get("query") is not None:
        return await rerank(await checked(given, RerankRequest), request)
    if given.get("input") is None and given.get("messages") is None:
        return await score(await checked(given, ScoreRequest), request)
    if spec.convert == "embed":
        return await embeddings(await checked(given, EmbeddingRequest), request)
    return await classify(await checked(given, ClassifyRequest), request)
