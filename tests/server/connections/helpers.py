"""What the tests of this folder share."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from quire.config import ServerConfig
from quire.server.middleware import BodyLimits
from tests.server.wire import message

TIME = 0.4  # seconds for everything, where this is what a test is about
PATIENT = 60.0  # where it is not
SLACK = 15.0  # more than that is a connection that does not end
GET = message("GET", "/echo")
BIG = 64 << 20


def application(seconds: float) -> FastAPI:
    """Tells what it was asked. seconds: for a body."""
    app = FastAPI()

    @app.api_route("/echo", methods=["GET", "POST", "PUT", "HEAD", "OPTIONS"])
    async def echo(request: Request) -> Response:
        body = await request.body()
        told = {"body": body.decode(), "headers": [[k, v] for k, v in request.headers.items()]}
        return JSONResponse({**told, "path": request.url.path, "query": request.url.query})

    @app.post("/early")
    async def early() -> Response:
        return PlainTextResponse("no thanks")

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("well")

    @app.get("/big")
    async def big() -> Response:
        return Response(b"x" * BIG)

    @app.get("/stream")
    async def stream(request: Request, parts: int = 3, size: int = 5, seconds: float = 0.0) -> Response:
        async def parts_of() -> AsyncIterator[bytes]:
            for _ in range(parts):
                await asyncio.sleep(seconds)
                yield b"y" * size

        return StreamingResponse(parts_of())

    @app.get("/wait")
    async def wait(request: Request) -> Response:
        app.state.waiting = True
        while (await request.receive())["type"] != "http.disconnect":
            pass
        app.state.waiting = False
        return PlainTextResponse("left")

    app.add_middleware(BodyLimits, most=8 << 20, seconds=seconds)
    return app


def config(seconds: float = TIME, **more: Any) -> ServerConfig:
    times = dict.fromkeys(("header_timeout", "body_timeout", "timeout_keep_alive", "send_timeout"), seconds)
    return ServerConfig(**{"port": 0, **times, **more})


def answered(client: socket.socket) -> dict[str, Any]:
    """The body of one whole answer, and nothing of the next."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = client.recv(1)
        assert part, head
        head += part
    assert head.startswith(b"HTTP/1.1 200 "), head
    return dict(json.loads(client.recv(length_of(head), socket.MSG_WAITALL)))


def length_of(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


CHUNKED = "Transfer-Encoding: chunked"
