"""Routes that read JSON bodies in Rust: several times as fast as Python's reader, and the event loop waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.context import context_of
from quire.server.api.schemas import passing_over_unknown


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False, cache_strings=False)
        except ValueError as error:  # which FastAPI expects to be json's own
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    """A route whose requests are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            if context_of(request).config.unknown_fields != "warn":
                return await handler(read)
            with passing_over_unknown() as unknown:
                request.scope.setdefault("state", {})["unknown"] = unknown
                return await handler(read)

        return handle
