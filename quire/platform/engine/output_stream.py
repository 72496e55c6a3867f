"""Outputs on their way from steps to those who wait for them, on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.platform.engine.step_loop import Delivery
from quire.platform.outputs.outputs import BeamSearchOutput
from quire.platform.outputs.pooled import AnyOutput

# Seconds between two times that readers are woken up for tokens in the midst of their answers. A small model makes
# steps faster than a stream's tokens can be written one by one; nobody sees the difference. With many streams it is
# more, so that they take this share of the event loop's time: who makes the steps needs Python's lock, too.
PACE = 0.004
MOST_PACE = 0.016
SHARE = 0.2


class _Mailbox:
    """What has come for one reader. begun: something has."""

    __slots__ = ("_come", "_waiter", "begun")

    def __init__(self) -> None:
        self.begun = False
        self._come: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._come)

    def put(self, delivery: Delivery) -> None:
        self.begun = True
        if self._come and isinstance(delivery, list) and isinstance(self._come[-1], list):
            self._come[-1] += delivery  # taken together
        else:
            self._come.append(delivery)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> Delivery:
        """The oldest; waits for one."""
        while not self._come:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._come.pop(0)


class Outputs:
    """The outputs of some requests, in the order in which steps make them; ends when all have finished.

    Leaving it (`async with`) aborts what has not. Raises EngineClosedError when the engine ends first.
    """

    def __init__(
        self,
        unfinished: set[str],
        mailbox: _Mailbox,
        abort: Callable[[set[str]], None],
        forget: Callable[[str], None],
    ) -> None:
        self._unfinished = unfinished
        self._mailbox = mailbox
        self._abort = abort
        self._forget = forget
        self._ready: list[AnyOutput] = []  # in reverse

    async def __aenter__(self) -> Outputs:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> int:
        """Abort what has not finished. Returns how many requests that were."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._abort(unfinished)
        return len(unfinished)

    @property
    def ready(self) -> bool:
        """Whether there are more that need not be waited for."""
        return bool(self._ready) or bool(self._mailbox)

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Any:
        while not self._ready:
            if not self._unfinished:
                raise StopAsyncIteration
            delivery = await self._mailbox.take()
            if isinstance(delivery, BaseException):
                raise delivery
            self._ready = delivery[::-1]
        output = self._ready.pop()
        if isinstance(output, BeamSearchOutput) or output.finished:
            self._unfinished.discard(output.request_id)
            self._forget(output.request_id)
        return output


class OutputQueues:
    """Where the outputs of each request go: those of one `submit` share a mailbox. It belongs to the event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, _Mailbox] = {}  # by request
        self._held: list[AnyOutput] = []  # that wait for their time
        self._last = 0.0  # when outputs were handed out, by the loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._took = 0.0  # seconds that readers took for what they were handed last

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, request_ids: set[str], abort: Callable[[set[str]], None]) -> Outputs:
        """Make a queue for these. abort: ends those that have not finished when their reader goes."""
        queue = _Mailbox()
        self._queues.update(dict.fromkeys(request_ids, queue))
        return Outputs(request_ids, queue, abort, self.forget)

    def forget(self, request_id: str) -> None:
        """Its last output has been handed out, or nobody wants it."""
        self._queues.pop(request_id, None)

    def fail(self, request_id: str, error: Exception) -> None:
        """Raise an error where a request's outputs are waited for."""
        self._hand_out()
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put(error)

    def fail_all(self, error: BaseException) -> None:
        """Raise an error wherever outputs are waited for."""
        self._hand_out()
        for queue in set(self._queues.values()):
            queue.put(error)

    def deliver(self, outputs: Sequence[AnyOutput]) -> None:
        """Hand a step's outputs to those who wait for them: at once a request's first and its last, and what goes on
        at most every `PACE` seconds, or more."""
        loop = asyncio.get_running_loop()
        pace = max(PACE, min(self._took / SHARE, MOST_PACE))
        self._held += outputs
        if loop.time() - self._last >= pace or self._is_urgent(outputs):
            self._hand_out_timed()
        elif self._timer is None:
            self._timer = loop.call_at(self._last + pace, self._hand_out_timed)

    def _is_urgent(self, outputs: Iterable[AnyOutput]) -> bool:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None and (not queue.begun or isinstance(output, BeamSearchOutput) or output.finished):
                return True
        return False

    def _hand_out_timed(self) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self._hand_out()
        loop.call_soon(self._have_taken, time.thread_time())  # behind all readers, which are woken up by now

    def _have_taken(self, begun: float) -> None:
        """begun: in the time that the loop's thread has had a core and Python's lock, or nearly."""
        self._took = time.thread_time() - begun

    def _hand_out(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        outputs, self._held = self._held, []
        batches: dict[int, tuple[_Mailbox, list[AnyOutput]]] = {}
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                batches.setdefault(id(queue), (queue, []))[1].append(output)
        for queue, batch in batches.values():
            queue.put(batch)
