"""/v1/adapters: listed, uploaded and unloaded; and POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from quire.errors import SleepingError
from quire.server.context import ServerContext, context_of, note
from quire.server.http.gone import ClientGoneError
from quire.server.origins import check_origin
from quire.server.responses.errors import ApiError
from quire.server.schemas.body import JsonRoute, validated
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.uploads.store import Upload

router = APIRouter(route_class=JsonRoute)

_PIECE = 1 << 20  # bytes of an upload that are handed on at once
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["lora_name", "files"],
                    "properties": {
                        "lora_name": {"type": "string", "minLength": 1, "maxLength": 256},
                        "files": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "minItems": 1,
                            "description": "adapter_config.json and adapter_model.safetensors, or one .zip of both.",
                        },
                        "load_inplace": {"type": "boolean", "default": False},
                        "base_model_name": {"type": "string"},
                    },
                }
            }
        },
    }
}


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


@router.get("/v1/adapters")
async def list_adapters(request: Request) -> JSONResponse:
    """Every adapter: where it is, what it takes, what of it was bound; mixtures; and what an upload may be."""
    return JSONResponse(context_of(request).served.adapters())


@router.post("/v1/adapters", openapi_extra=_FORM)
async def upload_adapter(request: Request) -> JSONResponse:
    """Take an adapter's files, and let a name stand for them. Every tensor binds, or nothing is left of them."""
    context = _allowed(request)
    store = context.served.store()
    if context.engine.is_sleeping:  # before all of it is sent
        raise SleepingError("the engine sleeps: POST /wake_up first.")
    async with store.upload(request.headers.get("content-type", "")) as upload:
        await _receive(request, upload)
        body = validated(upload.form.fields, LoadAdapterRequest)
        assert isinstance(body, LoadAdapterRequest)
        note(request, adapter=body.lora_name)
        with context.engine.accepted(), context.admit(1):
            loading = asyncio.ensure_future(context.served.load_uploaded(body, upload))
            loaded = await asyncio.shield(loading)  # once begun, it ends one way or the other
    return JSONResponse({"status": "loaded", **loaded, "ignored_files": upload.form.ignored})


@router.delete("/v1/adapters/{name:path}")
async def unload_adapter(name: str, request: Request) -> JSONResponse:
    """Forget an adapter or a mixture, as /v1/unload_lora_adapter does; the files of an uploaded one go, too."""
    return await unload_lora_adapter(UnloadAdapterRequest(lora_name=name), request)


async def _receive(request: Request, upload: Upload) -> None:
    """Hand the body on in large pieces. Raises ApiError, and ClientGoneError."""
    held = bytearray()
    try:
        async for data in request.stream():
            held += data
            if len(held) >= _PIECE:
                await upload.feed(bytes(held))
                held.clear()
    except ClientDisconnect:
        raise ClientGoneError from None
    await upload.feed(bytes(held))
    await upload.finish()


def _allowed(request: Request) -> ServerContext:
    context = context_of(request)
    if not context.config.allow_runtime_lora:
        raise ApiError(403, "adapters are not changed over HTTP: start the server with --allow-runtime-lora.")
    check_origin(request, context.config)
    return context
