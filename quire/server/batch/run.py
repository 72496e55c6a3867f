"""A batch through the application: each request as a client would send it, without a socket between."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.types import ASGIApp, Message

from quire.errors import EngineClosedError
from quire.server.batch.answers import Answer, AnswerFile
from quire.server.batch.requests import BatchRequest

logger = logging.getLogger("quire.server")

_ENDED = (503, 529)  # what routes answer when the engine takes no requests
# What routes call a prompt's tokens, and an answer's: each has one of these, or parts of it.
_PROMPT = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_BODIES = 4  # of the largest size, that are in flight at once: the server would take 8
_AHEAD = 2  # requests in flight for each that the engine runs: what follows is tokenized while these are computed


@dataclass
class Tally:
    """What has been answered in this run. statuses: number of answers by their status."""

    statuses: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.statuses[answer.status] += 1
        usage = from_json(answer.body).get("usage") or {}
        self.prompt_tokens += sum(usage.get(name) or 0 for name in _PROMPT)
        self.output_tokens += sum(usage.get(name) or 0 for name in _OUTPUT)

    @property
    def answers(self) -> int:
        return self.statuses.total()

    @property
    def failed(self) -> int:
        return self.answers - self.statuses[200]


async def ask(app: ASGIApp, request: BatchRequest) -> Answer:
    """One request's answer."""
    parts: list[Message] = []
    body: Message | None = {"type": "http.request", "body": request.body, "more_body": False}

    async def receive() -> Message:
        nonlocal body
        if body is None:
            await asyncio.Event().wait()  # the client stays until it has its answer
        taken, body = body, None
        assert taken is not None
        return taken

    async def send(message: Message) -> None:
        parts.append(message)

    try:
        await app(_scope(request), receive, send)
    except Exception:
        if not parts:  # else it has been answered, and is raised for a server's log
            raise
    status = parts[0]["status"]
    headers = dict(parts[0]["headers"])
    answered = b"".join(part.get("body", b"") for part in parts[1:])
    return Answer(status, headers[b"x-request-id"].decode(), answered)


def _scope(request: BatchRequest) -> dict[str, Any]:
    headers = {
        "host": "batch",
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "x-request-id": request.id,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": None,
        "client": None,
        "state": {},
    }


class BatchRun:
    """Asks for the answers to many requests, some of them at once, and has them written as they come.

    on_answer: called after each has been written.
    """

    def __init__(
        self,
        app: ASGIApp,
        file: AnswerFile,
        max_num_seqs: int,
        max_request_bytes: int,
        on_answer: Callable[[Tally], object],
    ) -> None:
        self.tally = Tally()
        self._app = app
        self._file = file
        self._most = _AHEAD * max_num_seqs
        self._most_bytes = _BODIES * max_request_bytes
        self._on_answer = on_answer
        self._running: set[asyncio.Task[None]] = set()
        self._bytes = 0  # of their bodies
        self._waiting = 0  # of those: there was no room for their sequences
        self._news = asyncio.Event()  # one has ended
        self._failure: BaseException | None = None

    async def run(self, requests: Iterable[BatchRequest]) -> None:
        """Until all are answered. Raises EngineClosedError if the engine ends before; when cancelled, what runs is
        given up.
        """
        try:
            for request in requests:
                while self._running and not self._has_room(len(request.body)):
                    await self._one_ends()
                self._begin(request)
                await asyncio.sleep(0)
            while self._running:
                await self._one_ends()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _has_room(self, size: int) -> bool:
        return len(self._running) < self._most and not self._waiting and self._bytes + size <= self._most_bytes

    def _begin(self, request: BatchRequest) -> None:
        size = len(request.body)

        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            self._bytes -= size
            if not task.cancelled() and task.exception() is not None:
                self._failure = self._failure or task.exception()
            self._news.set()

        task = asyncio.create_task(self._answer(request))
        task.add_done_callback(ended)
        self._running.add(task)
        self._bytes += size

    async def _one_ends(self) -> None:
        self._news.clear()
        await self._news.wait()
        if self._failure is not None:
            raise self._failure

    async def _answer(self, request: BatchRequest) -> None:
        answer = await ask(self._app, request)
        if answer.status == 429:
            answer = await self._when_there_is_room(request)
        if answer.status in _ENDED:
            raise EngineClosedError("the engine has ended before the batch has; the log says why")
        self._file.add(request, answer)
        self.tally.add(answer)
        self._on_answer(self.tally)

    async def _when_there_is_room(self, request: BatchRequest) -> Answer:
        """Ask again when another has ended; meanwhile no further requests are begun."""
        self._waiting += 1
        try:
            while True:
                if len(self._running) > self._waiting:  # else what was in the way is gone already
                    await self._one_ends()
                answer = await ask(self._app, request)
                if answer.status != 429:
                    return answer
        finally:
            self._waiting -= 1
