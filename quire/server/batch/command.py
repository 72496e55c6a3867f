"""`quire run-batch`, once its files have been looked at: from options to the last answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.errors import EngineClosedError
from quire.server.batch.answers import AnswerFile
from quire.server.batch.plan import Plan
from quire.server.batch.run import BatchRun, Tally
from quire.server.launch import Service, Task, load

_KILLED = 128  # and a signal's number: the exit code of what it ended, as shells have it


@dataclass(frozen=True)
class Outcome:
    """How a batch ended. signal: that ended it before its time. error: why the engine did."""

    tally: Tally
    seconds: float
    signal: int | None = None
    error: str | None = None


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
    max_num_seqs = service.engine.llm_engine.config.scheduler.max_num_seqs
    run = BatchRun(service.app, file, max_num_seqs, service.config.max_request_bytes, on_answer)
    begun = time.monotonic()
    error: str | None = None
    async with service.app.router.lifespan_context(service.app):
        work = asyncio.ensure_future(run.run(plan.open_requests()))
        with _ended_by_signals(work) as came:
            try:
                await work
            except asyncio.CancelledError:
                if not came:
                    raise
            except EngineClosedError as failure:
                error = str(failure)
    return Outcome(run.tally, time.monotonic() - begun, came[0] if came else None, error)


@contextmanager
def _ended_by_signals(work: asyncio.Future[None]) -> Iterator[list[int]]:
    """The first one cancels the work and is told; a second one ends the program at once."""
    came: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: Any) -> None:
        if came:
            os._exit(_KILLED + number)
        came.append(number)
        loop.call_soon_threadsafe(work.cancel)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, on_signal)
    try:
        yield came
    finally:
        for number, handler in before.items():
            with suppress(TypeError):  # one that was not set from Python
                signal.signal(number, handler)
