"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from quire.server.context import ServerContext, context_of, note
from quire.server.responses.errors import ApiError
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> JSONResponse:
    """Let a name stand for an adapter's folder, or for a mixture. Every tensor binds, or the adapter is refused."""
    context = _allowed(request)
    note(request, adapter=body.lora_name)
    with context.engine.accepted(), context.admit(1):
        loaded = await context.served.load(body)
    return JSONResponse({"status": "loaded", **loaded})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> JSONResponse:
    """Forget an adapter. Answers when no request holds it any more, with the bytes that this gave back."""
    context = _allowed(request)
    note(request, adapter=body.lora_name)
    with context.engine.accepted(), context.admit(1):
        unloaded = await context.served.unload(body)
    return JSONResponse({"status": "unloaded", **unloaded})


def _allowed(request: Request) -> ServerContext:
    context = context_of(request)
    if not context.config.allow_runtime_lora:
        raise ApiError(403, "adapters are not changed over HTTP: start the server with --allow-runtime-lora.")
    return context
