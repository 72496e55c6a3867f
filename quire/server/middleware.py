"""What every request passes before its route: an id and a line in the log, keys, limits of its body.

Plain ASGI, in this order from the outside in.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.context import IGNORED, REQUEST_ID, ignored_fields
from quire.server.metrics import Metrics
from quire.server.paths import asks_for_page, given_keys, route_path, speaks_anthropic
from quire.server.responses.errors import ApiError, remember, response_to

access = logging.getLogger("quire.server.access")

OPEN = frozenset({"/health", "/ready", "/ping"})  # without a key, and answered when there is no room for others
_PROBES = frozenset({*OPEN, "/metrics"})  # asked for every few seconds
_ADMIN = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/reset_prefix_cache"})
_ADAPTERS = "/v1/adapters"  # adapters are uploaded here, and unloaded below it
_PROGRESS = 1 << 20  # bytes of an upload that must come within the time for a body
_FRAME = 1 << 20  # bytes of a form beside its files
_BODIES = 8  # of the largest size, that there may be at once
_LONGEST_PATH = 256  # characters in the log


class RequestLog:
    """Gives each request an id (the client's X-Request-Id, where that is one), counts it and logs one line."""

    def __init__(self, app: ASGIApp, metrics: Metrics, lines: bool, probes: bool) -> None:
        """lines: whether to log at all. probes: lines of those that went well too."""
        self._app = app
        self._metrics = metrics
        self._lines = lines
        self._probes = probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"], state["facts"] = request_id, {}
        status = 499  # nginx's number for a client that has gone, if no answer begins
        begun = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if speaks_anthropic(scope):
                    headers["Request-Id"] = request_id  # where its package looks for it
                ignored = ignored_fields(state)
                if ignored is not None:
                    headers[IGNORED] = state["facts"]["ignored"] = ignored
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._note(scope, request_id, status, time.monotonic() - begun)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.answered(route, status)
        if self._lines and (self._probes or status >= 400 or route not in _PROBES):
            facts = {**scope["state"]["facts"], "request_id": request_id, "status": status, "seconds": seconds}
            path = quote(scope["path"][:_LONGEST_PATH], errors="replace")  # no line breaks: one line for a request
            access.info("%s %s", scope["method"], path, extra=facts)


class ApiKeys:
    """Lets only those in who know a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_key: str | None, page: bool) -> None:
        """page: it is served; its files say nothing of this server, and everybody may have them."""
        self._app = app
        self._page = page
        self._keys = [key.encode() for key in keys]
        self._admin = admin_key.encode() if admin_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope)
            if error is not None:
                remember(scope, error)
                return await response_to(scope, error)(scope, receive, send)
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = route_path(scope)
        if path in OPEN or (self._page and asks_for_page(scope)):
            return None
        given = given_keys(scope)
        is_admin = self._admin is not None and any([hmac.compare_digest(one, self._admin) for one in given])
        needs_admin = self._admin is not None and (path in _ADMIN or _changes_adapters(scope))
        if is_admin or not (self._keys or needs_admin):
            return None
        known = any([hmac.compare_digest(one, key) for one in given for key in self._keys])
        if needs_admin:
            if known:
                return ApiError(403, "this needs the admin key (--admin-api-key).", code="admin_key_needed")
        elif known:
            return None
        needed = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY."
        message = "the API key is wrong." if any(given) else needed
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _changes_adapters(scope: Scope) -> bool:
    path = route_path(scope)
    below = path == _ADAPTERS or path.startswith(f"{_ADAPTERS}/")
    return below and scope["method"] not in ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class _Limit:
    """Of a body: most bytes, by which setting. held: it is held in memory until the request is answered, and must come
    whole in time; else it goes to a disk, and must go on coming.
    """

    most: int
    setting: str
    held: bool

    def error(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.most} bytes, which is the limit ({self.setting}).")


class BodyLimits:
    """Bounds what bodies take: bytes of one, of all requests at once, and seconds until all of one is here."""

    def __init__(self, app: ASGIApp, most: int, seconds: float, upload: int = 0) -> None:
        """seconds: for a whole body, or for each MiB of an adapter's. upload: most bytes of these."""
        self._app = app
        self._limit = _Limit(most, "--max-request-bytes", held=True)
        self._upload = _Limit(upload + _FRAME, "--max-adapter-upload-bytes", held=False)
        self._seconds = seconds
        self._taken = 0  # bytes of bodies whose requests have not been answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        is_upload = scope["method"] == "POST" and route_path(scope) == _ADAPTERS
        limit = self._upload if is_upload else self._limit
        declared = headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit.most):
            remember(scope, limit.error())
            return await response_to(scope, limit.error())(scope, receive, send)
        brings_one = declared not in ("", "0") or "transfer-encoding" in headers
        if brings_one and limit.held and self._taken > _BODIES * limit.most:
            full = ApiError(429, "large requests wait: try again later.", headers={"Retry-After": "1"})
            remember(scope, full)
            return await response_to(scope, full)(scope, receive, send)
        taken, complete, held = 0, False, 0
        loop = asyncio.get_running_loop()
        left, due = self._seconds, _PROGRESS  # seconds that may still be waited; bytes from which on they begin anew

        async def limited() -> Message:
            nonlocal taken, complete, held, left, due
            if complete:
                return await receive()
            begun = loop.time()
            try:
                async with asyncio.timeout(max(left, 0.0)):
                    received: Any = await receive()
            except TimeoutError:
                complete = True
                message = f"the body did not come within {self._seconds:g} s"
                raise HTTPException(408, message, {"Connection": "close"}) from None  # nobody reads the rest
            taken += len(received.get("body", b""))
            left -= loop.time() - begun  # what the server took since is not the client's fault
            if limit.held:
                self._taken, held = self._taken + taken - held, taken
            elif taken >= due:
                left, due = self._seconds, taken + _PROGRESS
            complete = not received.get("more_body", False)
            if taken > limit.most:
                complete = True
                raise HTTPException(413, limit.error().message)
            return dict(received)

        try:
            await self._app(scope, limited, send)
        finally:
            self._taken -= held
