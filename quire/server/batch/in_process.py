"""A batch through the application, in this process: requests as a client would send them, without a socket between."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message

from quire.server.batch.answers import Answer, AnswerFile
from quire.server.batch.command import Outcome, answer_all
from quire.server.batch.plan import Plan
from quire.server.batch.requests import BatchRequest
from quire.server.batch.run import BatchEndedError, BatchRun, Later, Tally
from quire.server.launch import Service, Task, load

_ENDED = (503, 529)  # what routes answer when the engine takes no requests
_AHEAD = 2  # requests in flight for each that the engine runs: what follows is tokenized while these are computed


def run_batch(task: Task, plan: Plan, file: AnswerFile, on_answer: Callable[[Tally], object]) -> Outcome:
    """Load what the options ask for, and answer the requests that have no answer. Raises QuireError."""
    service = load(task)
    gc.freeze()  # as the server does
    outcome = asyncio.run(_run(service, plan, file, on_answer))
    if service.engine.step_loop.stuck:  # its thread would hold the process
        logging.shutdown()
        os._exit(1)
    return outcome


async def _run(service: Service, plan: Plan, file: AnswerFile, on_answer: Callable[[Tally], object]) -> Outcome:
    most = _AHEAD * service.engine.llm_engine.config.scheduler.max_num_seqs
    run = BatchRun(partial(ask, service.app), file, most, plan.most, on_answer)
    async with service.app.router.lifespan_context(service.app):
        return await answer_all(run, plan)


async def ask(app: ASGIApp, request: BatchRequest) -> Answer | Later:
    """One request's answer. Raises BatchEndedError if the engine has ended."""
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
    if status == 429:
        return Later("the queue is full", full=True)
    if status in _ENDED:
        raise BatchEndedError("the engine has ended before the batch has; the log says why")
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
