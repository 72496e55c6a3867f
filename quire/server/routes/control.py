"""POST /sleep, /wake_up and /reset_prefix_cache, GET /is_sleeping: vLLM's routes for whoever runs the server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from quire.errors import CheckpointError, RequestError
from quire.server.context import ServerContext, context_of
from quire.server.origins import check_origin
from quire.server.responses.errors import ApiError

router = APIRouter()


@router.post("/sleep")
async def sleep(request: Request, level: int = 1) -> JSONResponse:
    """Give the memory of weights and KV blocks back, once the requests that run have finished. New ones get 503 until
    POST /wake_up. 409, and the server goes on, when some have not finished after --unload-timeout seconds."""
    context = _allowed(request)
    if level not in (1, 2):
        raise ApiError(400, f"level={level}: is 1 or 2.", "level")
    try:
        await context.engine.sleep(level, context.config.unload_timeout)
    except (RequestError, CheckpointError) as error:
        raise ApiError(409, str(error), code="cannot_sleep") from None
    return JSONResponse({"status": "sleeping"})


@router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> JSONResponse:
    """Read the weights again: answers are what they were. tags: weights and kv_cache, where only one is to wake up."""
    context = _allowed(request)
    try:
        await context.engine.wake_up(tags)
    except CheckpointError as error:
        raise ApiError(409, str(error), code="cannot_wake_up") from None
    return JSONResponse({"status": "sleeping" if context.engine.is_sleeping else "awake"})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> JSONResponse:
    """Whether requests are refused until POST /wake_up."""
    return JSONResponse({"is_sleeping": context_of(request).engine.is_sleeping})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> JSONResponse:
    """Forget the beginnings of prompts that were computed before; requests that run keep theirs."""
    context = _allowed(request)
    return JSONResponse({"status": "reset" if await context.engine.reset_prefix_cache() else "nothing was reset"})


def _allowed(request: Request) -> ServerContext:
    context = context_of(request)
    if not context.config.enable_admin_routes:
        raise ApiError(403, "this can stop others' requests: start the server with --enable-admin-routes.")
    check_origin(request, context.config)
    return context
