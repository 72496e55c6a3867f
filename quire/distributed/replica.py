"""One replica: an engine, and a server of its own that only doors and the ledger of its application ask.

Ray says where it runs, how many there are, which of them a request is for and when one ends; tokens come by HTTP, since
a hop of Ray's costs half a millisecond of a processor for each piece of a stream.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.distributed.changes import ReplicaAdapters
from quire.distributed.hints import tag_of
from quire.distributed.participant import Participant
from quire.distributed.steps import SECRET, STEPS, TICKET, Entry
from quire.errors import QuireError
from quire.server.http.server import HttpServer
from quire.server.launch import Service, Task, load
from quire.server.responses.errors import ApiError, Json

logger = logging.getLogger("quire.distributed")

_CLAIM = 30.0  # seconds within which a door must use its ticket
# What a server does that stands alone, and a replica does not: who asks it is a door, with the secret.
_OF_DOORS: dict[str, Any] = {"uds": None, "port": 0, "ssl_certfile": None, "ssl_keyfile": None}


@dataclass(frozen=True)
class ReplicaOptions:
    """What every replica of an application is made of.

    settings: of `quire serve`, by name. vllm: of vLLM's options those that ask for nothing else than what is done.
    """

    settings: Mapping[str, Any] = field(repr=False)  # keys are among them
    vllm: Mapping[str, Any]
    secret: str = field(repr=False)


@dataclass
class _Ticket:
    """An admission: Ray counts it as a request that runs until `done`."""

    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class EngineReplica:
    """The class of Ray Serve's deployment. `__init__` is done when requests can be answered."""

    async def __init__(self, options: ReplicaOptions, ledger: Any) -> None:  # type: ignore[misc]
        """ledger: a handle. Raises QuireError."""
        import ray
        from ray import serve

        self.name = serve.get_replica_context().replica_id.unique_id
        self._tickets: dict[str, _Ticket] = {}
        service = await asyncio.to_thread(load, Task(options.settings, options.vllm), uploads=False)
        self._service = replace(
            service, config=replace(service.config, host=ray.util.get_node_ip_address(), **_OF_DOORS)
        )
        service.app.state.context.id_prefix = tag_of(self.name)
        self._adapters = ReplicaAdapters(service.app.state.context.served)
        self._server = await self._served(self._service, options.secret)
        self._part = Participant(self.name, self._server.address, self._adapters, ledger)
        await self._part.start()

    async def _served(self, service: Service, secret: str) -> HttpServer:
        service.app.add_middleware(Inside, secret=secret, tickets=self._tickets, adapters=self._adapters)
        server = HttpServer(service.app, service.config)
        await server.start()
        return server

    async def admit(self, hints: Mapping[str, Any]) -> AsyncIterator[dict[str, str]]:
        """Where a request may be sent, and a ticket to send with it; the call goes on until that request has ended.

        hints: for Serve's router, which chose this replica by them. With `awake` there is nothing to send.
        """
        name, ticket = secrets.token_hex(8), _Ticket()
        self._tickets[name] = ticket
        try:
            yield {"address": self._server.address, "ticket": name, "replica": self.name}
            with suppress(TimeoutError):
                if "awake" in hints:
                    return
                await asyncio.wait_for(ticket.claimed.wait(), _CLAIM)
                await ticket.done.wait()
        finally:
            self._tickets.pop(name, None)

    async def check_health(self) -> None:
        """Raise where this replica is of no use any more: Serve starts another one then."""
        loop = self._service.engine.step_loop
        error = loop.health_error(self._service.config.step_timeout) or self._part.health_error()
        if error is not None:
            raise RuntimeError(error)

    async def __del__(self) -> None:  # Serve's name for the end, once no request runs here
        await self._part.leave()
        await self._service.engine.close(self._service.config.shutdown_timeout)
        await self._server.stop(1.0)


class Inside:
    """Lets doors and the ledger in, nobody else; ends tickets with their requests; takes the steps of changes."""

    def __init__(self, app: ASGIApp, secret: str, tickets: Mapping[str, _Ticket], adapters: ReplicaAdapters) -> None:
        self._app = app
        self._secret = secret.encode()
        self._tickets = tickets
        self._adapters = adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        told = {name: value for name, value in scope["headers"] if name in (SECRET.encode(), TICKET.encode())}
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in told]
        if not hmac.compare_digest(told.get(SECRET.encode(), b""), self._secret):
            return await ApiError(403, "this is a replica: ask a door of its application.").response(
                scope, receive, send
            )
        if (
            scope["path"].startswith(STEPS) and TICKET.encode() not in told
        ):  # with a ticket, a client asks through a door
            return await (await self._step(scope["path"].removeprefix(STEPS), receive))(scope, receive, send)
        ticket = self._tickets.get(told.get(TICKET.encode(), b"").decode("latin-1"))
        if ticket is None:
            return await self._app(scope, receive, send)
        ticket.claimed.set()
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.done.set()

    async def _step(self, step: str, receive: Receive) -> Json:
        try:
            told = _read(await _whole(receive))
            name, entry = told["name"], Entry(told["version"], told["body"])
            if step == "publish":
                return Json(await self._adapters.publish(name, entry))
            if step == "stage":
                await self._adapters.stage(name, entry, told.get("number"))
            elif step == "hold":
                self._adapters.hold(name, entry)
            elif step == "discard":
                self._adapters.discard(name, entry)
            else:
                raise ApiError(404, f"there is no step {step!r}.")
            return Json({})
        except ApiError as error:
            return Json(error.body, error.status)
        except QuireError as error:
            return Json(ApiError(400, str(error)).body, 400)


def _read(body: bytes) -> dict[str, Any]:
    import json

    told = json.loads(body)
    assert isinstance(told, dict)
    return told


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message: Message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
