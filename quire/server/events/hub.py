"""Who watches the engine: one looks for all of them, as often as the most eager wants, and not at all for nobody."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from quire.errors import EngineClosedError
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.engine.watching.snapshot import EngineSnapshot
from quire.server.events.state import StateEvent, StateWriter, engine_facts
from quire.server.responses.errors import ApiError, as_json

logger = logging.getLogger("quire.server")

MOST_WATCHERS = 16
LEAST_RATE, USUAL_RATE, MOST_RATE = 0.2, 4.0, 10.0  # events a second

# What watching may take, however large the pool is: of the engine's thread, and of one core elsewhere, where it has
# Python's lock. Events become rarer where that is not enough.
_COPYING_SHARE, _CODING_SHARE = 1 / 200, 1 / 250
_LATE = 0.05  # seconds; what is later has lost its turn
_KEEP_ALIVE = 10.0  # seconds without an event, after which a comment is sent
_COMMENT = b": nothing new\n\n"


@dataclass(eq=False)
class Watcher:
    """interval: seconds between its events. due: when the next is, by the loop's time. event: the last that it had;
    seen: the last step that it was told of. new: it has had none."""

    interval: float
    due: float
    event: StateEvent | None
    seen: int = 0
    new: bool = True


class EngineEvents:
    """Events for those who watch. For one event loop.

    A watcher has no queue: who is behind gets the newest state once it has taken the one before.
    """

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        """name: what clients call the model."""
        self._engine = engine
        self._facts = engine_facts(engine.llm_engine, name)
        self._watchers: set[Watcher] = set()
        self._looked = 0.0  # the loop's time
        self._costs = (0.0, 0.0)  # seconds that the last two looks ask to be apart, for their share
        self._look: _Look | None = None
        engine.watch.on_end = self._wake

    @contextmanager
    def joined(self, rate: float) -> Iterator[Watcher]:
        """Be one of those who watch. Raises ApiError while there are as many as there may be."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise ApiError(
                429,
                f"{MOST_WATCHERS} watch the engine already: close a page or a terminal that does, or try again later.",
                code="too_many_watchers",
                headers={"Retry-After": "5"},
            )
        self._engine.step_loop.check_runs()
        if self._look is None:
            self._look = _Look(StateWriter(self._facts, self._engine.watch.began))
            self._engine.watch.begin()
            self._look.task = asyncio.ensure_future(self._keep_looking(self._look))
        watcher = Watcher(1 / rate, asyncio.get_running_loop().time(), self._look.event)
        self._watchers.add(watcher)
        self._look.changed.set()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._stop_looking()

    def _stop_looking(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            self._engine.watch.end()
            look.coder.shutdown(wait=False, cancel_futures=True)
            if look.task is not None:
                look.task.cancel()

    async def events(self, watcher: Watcher) -> AsyncGenerator[bytes, None]:
        """A watcher's events, until it leaves or the engine ends."""
        loop, look = asyncio.get_running_loop(), self._look
        assert look is not None
        told = loop.time()
        while not (look.ended or self._engine.watch.ended):
            event, news = look.event, look.news
            if event is not None and event is not watcher.event and loop.time() >= watcher.due:
                yield event.after(watcher.seen)
                told = loop.time()
                watcher.event, watcher.seen, watcher.new = event, event.last, False
                watcher.due = max(watcher.due + watcher.interval, told + watcher.interval / 2)
            elif loop.time() >= told + _KEEP_ALIVE:
                yield _COMMENT
                told = loop.time()
            else:
                await _wait(news, told + _KEEP_ALIVE - loop.time())
        if look.fault is not None:
            yield look.fault

    # -- looking --------------------------------------------------------------------------------------------------

    async def _keep_looking(self, look: _Look) -> None:
        try:
            while not self._engine.watch.ended:
                await self._until_due(look)
                snapshot = await self._engine.watch.snapshot()
                loop = asyncio.get_running_loop()
                event, seconds = await loop.run_in_executor(look.coder, self._code, look.writer, snapshot)
                self._costs = self._costs[1], max(snapshot.cost / _COPYING_SHARE, seconds / _CODING_SHARE)
                look.tell(event)
        except EngineClosedError:
            look.end(None)
        except Exception:  # who watches must not stop what is watched
            logger.exception("the engine's state could not be told")
            error = ApiError(500, "the engine's state could not be told; the server's log says why.")
            look.end(b"event: error\ndata: " + as_json(error.body) + b"\n\n")

    async def _until_due(self, look: _Look) -> None:
        """Wait until some watcher's next event is due."""
        loop = asyncio.get_running_loop()
        while not self._engine.watch.ended:
            least = max(1 / MOST_RATE, min(self._costs))  # what is new to the processor takes longer, once
            wanted = min((0.0 if one.new else one.interval for one in self._watchers), default=0.0)
            due, now = self._looked + max(least, wanted), loop.time()
            if now >= due:
                self._looked = due if now < due + _LATE else now
                return
            look.changed.clear()
            await _wait(look.changed, due - now)

    def _code(self, writer: StateWriter, snapshot: EngineSnapshot) -> tuple[StateEvent, float]:
        """The event, and the seconds that it has taken. In a thread of its own."""
        begun = time.thread_time()
        event = writer.write(snapshot, self._engine.list_lora_adapters())
        return event, time.thread_time() - begun

    def _wake(self) -> None:
        """The engine ends."""
        if self._look is not None:
            self._look.end(None)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """For an event, so long at most. Until Python 3.12, `wait_for` passes over a cancellation that comes with it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _Look:
    """What is seen while somebody watches.

    event: the newest. news: set when there is a newer one, and replaced then. changed: set when somebody has come, or
    the engine ends. fault: how streams end that can tell nothing any more.
    """

    def __init__(self, writer: StateWriter) -> None:
        self.writer = writer
        self.event: StateEvent | None = None
        self.news = asyncio.Event()
        self.changed = asyncio.Event()
        self.ended = False
        self.fault: bytes | None = None
        self.coder = ThreadPoolExecutor(1, "quire-events")
        self.task: asyncio.Task[None] | None = None

    def tell(self, event: StateEvent) -> None:
        """There is a newer one."""
        self.event = event
        self.news.set()
        self.news = asyncio.Event()

    def end(self, fault: bytes | None) -> None:
        """There will be none any more."""
        self.ended, self.fault = True, fault
        self.news.set()
        self.changed.set()
