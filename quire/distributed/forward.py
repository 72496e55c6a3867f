"""A request handed to the replica that Ray chooses, and its answer handed back as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Coroutine, Mapping
from functools import partial
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from yarl import URL

from quire.distributed.hints import hints_of
from quire.distributed.steps import AGAIN, SECRET, TICKET
from quire.server.http.gone import ClientGoneError, while_there
from quire.server.middleware import OPEN
from quire.server.paths import route_path, speaks_anthropic
from quire.server.responses.errors import ApiError, anthropic_body

logger = logging.getLogger("quire.distributed")

_TRIES = 4  # replicas that are asked, where one after the other goes before its answer begins
_ADMISSION = 600.0  # seconds that a request waits for a replica that has room, or that must start first
_CONNECT = 5.0  # seconds
_ASKED = 30.0  # seconds that a replica may take for what the door itself asks
# Of one connection, not of what is sent; and what the door writes anew.
_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
                  b"transfer-encoding", b"upgrade", b"date", b"expect"})  # fmt: skip
_OURS = frozenset({SECRET.encode(), TICKET.encode(), b"content-length"})
_KEYS = frozenset({b"authorization", b"x-api-key"})
_NEVER_THERE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # it had nothing of the request
_AUTO = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # which aiohttp would add


class Forward:
    """An ASGI application. A context manager, around its connections to replicas."""

    def __init__(self, replicas: Any, secret: str, base: Collection[str]) -> None:
        """replicas: the handle of their deployment. base: the base model's names."""
        self._admit = replicas.options(method_name="admit", stream=True)
        self._secret = secret
        self._base = frozenset(base)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Forward:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            auto_decompress=False,
            skip_auto_headers=_AUTO,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ApiError(404, "the door speaks HTTP alone.")
        if route_path(scope) in OPEN:  # by a method that they do not have; without a key, nobody starts a replica
            raise HTTPException(405)
        body = await _whole(receive)
        # A mounted application's root path has grown; a replica has that of the configuration.
        await while_there(scope, receive, self._serve(scope, body, send))

    async def awake(self) -> None:
        """Have one replica at least. Raises ApiError."""
        admission = self._admit.remote({"awake": True})
        ended = False
        try:
            await _first(admission)
            ended = True
        finally:
            if not ended:
                admission.cancel()
            _watched(admission)

    async def ask(self, method: str, address: str, path: str, scope: Scope) -> tuple[int, bytes]:
        """What one replica answers: status and body. It has its client's keys, and nothing else of this request.

        Raises aiohttp.ClientError and TimeoutError.
        """
        assert self._http is not None
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _KEYS}
        headers[SECRET] = self._secret
        async with self._http.request(
            method, address + path, headers=headers, timeout=aiohttp.ClientTimeout(_ASKED)
        ) as answer:
            return answer.status, await answer.read()

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        hints = hints_of(scope["path"], body, self._base)
        avoid, begun = list[str](), False  # begun: a replica that had the request has ended
        for tried in range(_TRIES):
            admission = self._admit.remote({**hints, "avoid": avoid})
            told, ended, life = None, False, None
            try:
                told = await _first(admission)
                if told is None:
                    continue  # the replica that was chosen has gone
                life = _watched(admission)
                answer = await _unless_gone(self._asked(scope, body, told), life)
                async with answer:
                    if AGAIN in answer.headers and tried + 1 < _TRIES:
                        avoid.append(told["replica"])  # it is not certain of its adapters; another may be
                        continue
                    life.add_done_callback(partial(_close_if_gone, answer))
                    await _handed_back(scope, answer, send)
                ended = True
                return
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                replica = told["replica"] if told is not None else None
                begun = begun or (told is not None and not isinstance(error, _NEVER_THERE))
                logger.warning("replica %s: %s, try %d", replica, type(error).__name__, tried + 1)
            finally:
                if not ended:
                    admission.cancel()  # else it may still wait for a replica, and a replica then for its request
                if life is None:
                    _watched(admission)
        raise ApiError(503, "the replicas that were asked ended before they answered: try again.",
                       code="replica_ended" if begun else None, headers={"Retry-After": "1"})  # fmt: skip

    async def _asked(self, scope: Scope, body: bytes, told: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._http is not None
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP and name not in _OURS
        )
        # The request's id is in the door's answer, the replica's log and ids.
        headers.update({SECRET: self._secret, TICKET: told["ticket"], "x-request-id": scope["state"]["request_id"]})
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        url = URL(told["address"] + target, encoded=True)
        data = body if body or scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS") else None
        return await self._http.request(scope["method"], url, data=data, headers=headers, allow_redirects=False)


async def _first(admission: Any) -> Mapping[str, str] | None:
    """What the replica says that Ray has chosen; None: it has gone. Raises ApiError where none has room for long."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    try:
        told: Mapping[str, str] = await asyncio.wait_for(anext(admission), _ADMISSION)
        return told
    except BackPressureError:
        raise ApiError(429, "too many requests wait: try again later.", headers={"Retry-After": "1"}) from None
    except TimeoutError:
        raise ApiError(503, f"no replica had room within {_ADMISSION:g} s.", headers={"Retry-After": "5"}) from None
    except DeploymentUnavailableError as error:
        raise ApiError(503, f"no replica can be started: {error}", headers={"Retry-After": "5"}) from None
    except (RayError, StopAsyncIteration) as error:
        logger.warning("no admission (%s)", type(error).__name__)
        return None


def _watched(admission: Any) -> asyncio.Task[bool]:
    """Until it ends; Ray keeps what is asked for until somebody has looked at its end. True: its replica has gone."""

    async def end() -> bool:
        from ray.exceptions import RayActorError

        try:
            async for _ in admission:
                pass
        except RayActorError:
            return True
        except (Exception, asyncio.CancelledError) as error:
            logger.debug("an admission ended with %s", type(error).__name__)
        return False

    task = asyncio.ensure_future(end())
    _draining.add(task)
    task.add_done_callback(_draining.discard)
    return task


async def _unless_gone(
    asked: Coroutine[Any, Any, aiohttp.ClientResponse], life: asyncio.Task[bool]
) -> aiohttp.ClientResponse:
    """An answer's beginning. Raises ConnectionError where its replica has gone: a lost machine closes nothing."""
    asking = asyncio.ensure_future(asked)
    try:
        await asyncio.wait({asking, life}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done() and life.result():
            raise ConnectionError("the replica has gone")
        return await asking
    except BaseException:
        asking.cancel()
        raise


def _close_if_gone(answer: aiohttp.ClientResponse, life: asyncio.Task[bool]) -> None:
    """Whoever reads it hears of it then."""
    if not life.cancelled() and life.result():
        answer.close()


_draining: set[asyncio.Task[bool]] = set()


async def _handed_back(scope: Scope, answer: aiohttp.ClientResponse, send: Send) -> None:
    """Pass an answer on. One that breaks off ends with an error in its stream, or without its end."""
    kept = ((name.lower(), value) for name, value in answer.raw_headers)
    headers = [(name, value) for name, value in kept if name not in _HOP and name != AGAIN.encode()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        async for part in answer.content.iter_any():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except (aiohttp.ClientError, ConnectionError) as error:
        logger.error("a replica ended while it answered (%s)", type(error).__name__)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise ClientDisconnect from None  # the connection is closed before the answer's end
        await send({"type": "http.response.body", "body": _broken(scope), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _broken(scope: Scope) -> bytes:
    """The event of a stream that breaks off."""
    error = ApiError(503, "the replica that answered has ended: send the request again.", code="replica_ended")
    if speaks_anthropic(scope):
        return b"event: error\ndata: " + json.dumps(anthropic_body(error, None)).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
