"""A short way to the routes that are asked most.

FastAPI takes a third of a millisecond to find a route and to solve what its endpoint depends on. Where that is a body
and the request alone, a good request needs none of it: its path is looked up, its body is checked against the same
model, and the same endpoint answers. Whatever is not plain goes FastAPI's way from its beginning, and has FastAPI's
answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.schemas.body import SMALL, JsonRoute, model_of, read_json, validated
from quire.server.schemas.openai import passing_over_unknown

# What clients say that send JSON; others mean it too, and FastAPI knows which.
_JSON = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})


@dataclass(frozen=True)
class _Short:
    """An endpoint and the model of its body. route: FastAPI's."""

    route: JsonRoute
    endpoint: Callable[..., Coroutine[Any, Any, Response]]
    model: type[BaseModel]


class ShortWay:
    """Serves POST requests of these routers' JSON routes; stands behind what every request passes.

    lenient: fields that are not known are passed over.
    """

    def __init__(self, app: ASGIApp, api: FastAPI, routers: Sequence[APIRouter], lenient: bool) -> None:
        """api: whose exception handlers there are, and whose root path."""
        self._app = app
        self._lenient = lenient
        self._shorts = _table(routers, api.root_path)
        # A fault of the server's is for the application's outermost handler.
        handlers = {key: one for key, one in api.exception_handlers.items() if key not in (500, Exception)}
        self._guarded = ExceptionMiddleware(self._serve, handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._shorts and _is_json(scope):
            await self._guarded(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        short = self._shorts[scope["path"]]
        scope["route"] = short.route  # before the body is read: who counts requests wants to know
        came: list[Message] = []
        body = await _whole(receive, came)
        with passing_over_unknown() if self._lenient else nullcontext() as unknown:
            fields = None if body is None else _checked(body, short.model)
            if fields is not None:
                if unknown is not None:
                    scope.setdefault("state", {})["unknown"] = unknown
                response = await short.endpoint(body=fields, request=Request(scope, receive, send))
                return await response(scope, receive, send)
        await self._app(scope, _again(came, receive), send)


def _table(routers: Sequence[APIRouter], root_path: str) -> Mapping[str, _Short]:
    """By path, as clients ask for it."""
    found: dict[str, _Short] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, JsonRoute) and route.methods == {"POST"} and "{" not in route.path:
                model = model_of(route.endpoint)
                if model is not None and set(inspect.signature(route.endpoint).parameters) == {"body", "request"}:
                    short = _Short(route, route.endpoint, model)
                    found.update(dict.fromkeys(_paths(route.path, root_path), short))
    return found


def _paths(path: str, root_path: str) -> list[str]:
    """As what the router finds a route: below the root path, or where none of that is before it."""
    if root_path and (path == root_path or path.startswith(f"{root_path}/")):
        return [root_path + path]
    return [path, root_path + path]


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":  # the first counts
            return value.lower() in _JSON
    return False


async def _whole(receive: Receive, came: list[Message]) -> bytes | None:
    """A body that is read faster than handed to a worker; None: it is none, or the client has gone. came: the messages
    that it is in."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        came.append(message)
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        more = message.get("more_body", False)
        if message["type"] != "http.request" or size > SMALL:
            return None
    return b"".join(parts)


def _checked(body: bytes, model: type[BaseModel]) -> BaseModel | None:
    """None: it is not as it should be."""
    try:
        return validated(read_json(body), model)
    except (ValueError, RequestValidationError):
        return None


def _again(came: list[Message], receive: Receive) -> Receive:
    """A request's messages from the first on."""
    rest = iter(came)

    async def received() -> Message:
        message = next(rest, None)
        return await receive() if message is None else message

    return received
