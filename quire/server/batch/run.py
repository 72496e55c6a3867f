"""Many requests of a batch at once, and their answers written as they come; who answers them is `ask`'s to know."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from pydantic_core import from_json

from quire.server.batch.answers import Answer, AnswerFile
from quire.server.batch.requests import BatchRequest

logger = logging.getLogger("quire.server")

# What routes call a prompt's tokens, and an answer's: each has one of these, or parts of it.
_PROMPT = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_BODIES = 4  # of the largest size, that are in flight at once: the server would take 8
_PATIENCE = 600.0  # seconds without an answer, after which none is waited for
_PAUSES = (0.5, 30.0)  # seconds before a request is asked again: the first time, and at most
_QUIET = 10.0  # seconds between two lines of the log about that
_ALONE = 2  # times that a request was being answered when that ended, from which on it is asked beside no other such
_MOST_BROKEN = 5  # of these times


class BatchEndedError(RuntimeError):
    """No further request of a batch is answered."""


@dataclass(frozen=True)
class Later:
    """A request that has no answer yet, and may have one later. why: in words.

    full: there was no room for it. broken: it was being answered when that ended. seconds: to wait before it is asked
    again; None, where it is full: until another request of the batch has ended. answer: what it has if it is not asked
    again.
    """

    why: str
    full: bool = False
    broken: bool = False
    seconds: float | None = None
    answer: Answer | None = None


# Answers a request. Raises BatchEndedError where none is answered any more.
Ask = Callable[[BatchRequest], Awaitable[Answer | Later]]


@dataclass
class Tally:
    """What has been answered in this run. statuses: number of answers by their status."""

    statuses: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.statuses[answer.status] += 1
        usage = _usage(answer)
        self.prompt_tokens += sum(_number(usage.get(name)) for name in _PROMPT)
        self.output_tokens += sum(_number(usage.get(name)) for name in _OUTPUT)

    @property
    def answers(self) -> int:
        return self.statuses.total()

    @property
    def failed(self) -> int:
        return self.answers - self.statuses[200]


def _usage(answer: Answer) -> dict[str, object]:
    """Of an answer of any server's."""
    body = from_json(answer.body)
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else {}


def _number(given: object) -> int:
    return given if type(given) is int and 0 <= given < 1 << 53 else 0


class BatchRun:
    """Asks for the answers to many requests, some of them at once, and has them written as they come.

    most: requests in flight. max_request_bytes: of the largest body. on_answer: called after each has been written.
    """

    def __init__(
        self, ask: Ask, file: AnswerFile, most: int, max_request_bytes: int, on_answer: Callable[[Tally], object]
    ) -> None:
        self.tally = Tally()
        self._ask = ask
        self._file = file
        self._most = most
        self._most_bytes = _BODIES * max_request_bytes
        self._on_answer = on_answer
        self._running: set[asyncio.Task[None]] = set()
        self._bytes = 0  # of their bodies
        self._waiting = 0  # of those: there was no room for them
        self._news = asyncio.Event()  # one has ended
        self._alone = asyncio.Lock()
        self._answered = time.monotonic()  # when the server last answered one; one that is given up counts for nothing
        self._next_warning = 0.0
        self._failure: BaseException | None = None

    async def run(self, requests: Iterable[BatchRequest]) -> None:
        """Until all are answered. Raises BatchEndedError if no more answers come before; when cancelled, what runs is
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
        said = await self._ask(request)
        if isinstance(said, Later):
            answer = await self._in_the_end(request, said)
        else:
            answer, self._answered = said, time.monotonic()
        self._file.add(request, answer)
        self.tally.add(answer)
        self._on_answer(self.tally)

    # -- asking again ----------------------------------------------------------------------------------------------

    async def _in_the_end(self, request: BatchRequest, said: Later) -> Answer:
        """Ask until there is an answer; while there is no room for it, no further requests are begun."""
        since, tries, broken, full = time.monotonic(), 0, 0, False
        try:
            while True:
                self._warn(request, said)
                broken += said.broken
                if said.full and not full:
                    full, self._waiting = True, self._waiting + 1
                if given_up := self._given_up(said, since, broken):
                    return given_up
                await self._pause(said, tries)
                async with self._beside_others(broken):
                    again = await self._ask(request)
                if isinstance(again, Answer):
                    self._answered = time.monotonic()
                    return again
                said, tries = again, tries + 1
        finally:
            self._waiting -= full

    def _given_up(self, said: Later, since: float, broken: int) -> Answer | None:
        """What it has instead of an answer, if it is not asked again. Raises BatchEndedError where no request has had
        an answer for long.

        One that was broken off often is to blame itself: the others of such are asked one by one.
        """
        if broken >= _MOST_BROKEN and said.answer is not None:
            return said.answer
        if said.seconds is None or (said.full and len(self._running) > self._waiting):
            return None  # others of the batch are being answered: then there is room
        now = time.monotonic()
        if now - max(since, self._answered) > _PATIENCE:
            raise BatchEndedError(f"no request was answered for {_PATIENCE:g} s: {said.why}")
        refused_alone = self._answered - since > _PATIENCE / 2  # and not with all others
        return said.answer if now - since > _PATIENCE and refused_alone and not said.full else None

    def _warn(self, request: BatchRequest, said: Later) -> None:
        if said.seconds is not None and time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _QUIET
            logger.warning("%r is asked again: %s", request.custom_id[:64], said.why)

    def _beside_others(self, broken: int) -> AbstractAsyncContextManager[object]:
        """Of requests that may be what ends their server, one at a time: else the others would be blamed with it."""
        return self._alone if broken >= _ALONE else nullcontext()

    async def _pause(self, said: Later, tries: int) -> None:
        if said.seconds is None:
            if len(self._running) > self._waiting:  # else what was in the way is gone already
                await self._one_ends()
            return
        first, most = _PAUSES
        longer = min(first * 2.0 ** min(tries, 10), most)
        wanted = said.seconds if said.full and said.seconds else max(said.seconds, longer)
        await asyncio.sleep(min(wanted, most) * random.uniform(1.0, 1.25))
