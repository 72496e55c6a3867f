"""`quire run-batch`, once its files have been looked at: from the first request to the last answer, or to a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quire.server.batch.plan import Plan
from quire.server.batch.run import BatchEndedError, BatchRun, Tally

_KILLED = 128  # and a signal's number: the exit code of what it ended, as shells have it


@dataclass(frozen=True)
class Outcome:
    """How a batch ended. signal: that ended it before its time. error: why no more answers came."""

    tally: Tally
    seconds: float
    signal: int | None = None
    error: str | None = None


async def answer_all(run: BatchRun, plan: Plan) -> Outcome:
    """Answer the requests that have no answer, until a signal comes. Raises QuireError for a file that has changed."""
    begun = time.monotonic()
    error: str | None = None
    work = asyncio.ensure_future(run.run(plan.open_requests()))
    with _ended_by_signals(work) as came:
        try:
            await work
        except asyncio.CancelledError:
            if not came:
                raise
        except BatchEndedError as failure:
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
