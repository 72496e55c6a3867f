"""The routes that a door answers itself: what concerns all replicas, and what no replica can do for the others."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from quire.config import ServerConfig
from quire.distributed.forward import Forward
from quire.distributed.scrape import summed
from quire.server.origins import check_origin
from quire.server.responses.errors import ApiError, Json
from quire.server.schemas.body import read_json, validated
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest, passing_over_unknown

logger = logging.getLogger("quire.distributed")

router = APIRouter()

_LEDGER = 2.0  # seconds that a question to it may take

_Body = TypeVar("_Body", bound=BaseModel)


@dataclass
class DoorContext:
    """What a door has. ledger: a handle. may_sleep: there may be no replica, and requests start one."""

    config: ServerConfig
    ledger: Any
    forward: Forward
    may_sleep: bool
    _members: dict[str, str] = field(default_factory=dict)

    async def members(self) -> dict[str, str]:
        """The replicas, and where they are; while the ledger is started anew, those that it knew last."""
        try:
            self._members = await asyncio.wait_for(self.ledger.members.remote(), _LEDGER)
        except Exception as error:  # Ray has many
            logger.warning("the ledger does not answer (%s)", type(error).__name__)
        return self._members

    async def awake(self) -> None:
        """Have one replica at least, without waiting for room on one that there is. Raises ApiError."""
        if not await self.members():
            await self.forward.awake()

    async def unloaded(self, name: str, number: int | None) -> JSONResponse:
        """What the ledger answers to an unloading; where no replica runs, none is started that would load it first."""
        if not await self.members() and await self.ledger.forget.remote(name):
            return Json({"status": "unloaded", "name": name, "freed_bytes": 0, "draining": False})
        await self.awake()
        return await self.changed("unload", name, number)

    async def changed(self, method: str, *args: Any) -> JSONResponse:
        """What the ledger answers to a change. Raises ApiError 503 where it ends meanwhile."""
        from ray.exceptions import RayError

        try:
            status, told = await getattr(self.ledger, method).remote(*args)
        except RayError as error:
            raise ApiError(
                503, f"the ledger ended while it made the change ({type(error).__name__}): try again, in place.",
                headers={"Retry-After": "5"},
            ) from None  # fmt: skip
        return Json(told, status)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> JSONResponse:
    """Load an adapter, or name a mixture, on every replica or on none."""
    door = _allowed(request)
    body = await _read(request, LoadAdapterRequest)
    await door.awake()
    return await door.changed("load", body.model_dump(exclude_unset=True))


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> JSONResponse:
    """Forget an adapter or a mixture, everywhere."""
    door = _allowed(request)
    body = await _read(request, UnloadAdapterRequest)
    return await door.unloaded(body.lora_name, body.lora_int_id)


@router.delete("/v1/adapters/{name:path}")
async def unload_adapter(name: str, request: Request) -> JSONResponse:
    """The same, by the adapter's path."""
    return await _allowed(request).unloaded(name, None)


@router.post("/v1/adapters")
async def upload_adapter(request: Request) -> JSONResponse:
    """Refused: the files would be on one machine."""
    _allowed(request)
    raise ApiError(
        501,
        "adapters are not uploaded to replicas: put the files where all of them can read them (--lora-root), "
        "and POST /v1/load_lora_adapter.",
    )


@router.post("/sleep")
@router.post("/wake_up")
async def sleep(request: Request) -> JSONResponse:
    """Refused: Ray starts and ends replicas."""
    raise ApiError(501, "replicas do not sleep: with deploy.replicas.min 0, they end where nobody asks for them.")


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """As one replica answers; all do it."""
    door: DoorContext = request.app.state.door
    if not door.config.enable_admin_routes:
        raise ApiError(403, "this can stop others' requests: start the server with --enable-admin-routes.")
    check_origin(request, door.config)
    members = (await door.members()).values()
    asked = (door.forward.ask("POST", one, "/reset_prefix_cache", request.scope) for one in members)
    try:
        answers = await asyncio.gather(*asked)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ApiError(503, f"a replica did not answer ({type(error).__name__}): try again.") from None
    if not answers:
        return JSONResponse({"status": "nothing was reset"})
    status, body = max(answers)
    return Response(body, status, media_type="application/json")


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
@router.get("/ready")
async def health(request: Request) -> JSONResponse:
    """200 while a replica takes requests, or one would be started for them."""
    door: DoorContext = request.app.state.door
    members = await door.members()
    if not members and not door.may_sleep:
        raise ApiError(503, "no replica takes requests", code="unhealthy")
    return JSONResponse({"status": "ok", "replicas": len(members)})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """What all replicas count: summed, and of each with a label."""
    door: DoorContext = request.app.state.door
    members = await door.members()
    texts = await asyncio.gather(*(_scraped(door, address, request) for address in members.values()))
    by_name = {name: text for name, text in zip(members, texts, strict=True) if text is not None}
    return Response(await asyncio.to_thread(summed, by_name), media_type=CONTENT_TYPE_LATEST)


async def _scraped(door: DoorContext, address: str, request: Request) -> str | None:
    try:
        status, text = await door.forward.ask("GET", address, "/metrics", request.scope)
    except (aiohttp.ClientError, TimeoutError):
        return None  # it ends, or hangs: the ledger will know
    return text.decode() if status == 200 else None


async def _read(request: Request, model: type[_Body]) -> _Body:
    """Raises RequestValidationError."""
    try:
        given = read_json(await request.body())
    except json.JSONDecodeError as error:
        told = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**told, "ctx": {"error": error.msg}}]) from None
    lenient = request.app.state.door.config.unknown_fields == "warn"
    with passing_over_unknown() if lenient else nullcontext() as unknown:
        if unknown is not None:
            request.scope["state"]["unknown"] = unknown
        return validated(given, model)  # type: ignore[return-value]


def _allowed(request: Request) -> DoorContext:
    door: DoorContext = request.app.state.door
    if not door.config.allow_runtime_lora:
        raise ApiError(403, "adapters are not changed over HTTP: start the server with --allow-runtime-lora.")
    check_origin(request, door.config)
    return door
