"""Outputs on their way from steps to those who wait for them, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from quire.platform.engine.step_loop import Delivery
from quire.platform.outputs.outputs import BeamSearchOutput, Output


class Outputs:
    """The outputs of some requests, in the order in which steps make them; ends when all have finished.

    Leaving it (`async with`) aborts what has not. Raises EngineClosedError when the engine ends first.
    """

    def __init__(
        self,
        unfinished: set[str],
        output_queue: asyncio.Queue[Delivery],
        abort: Callable[[set[str]], None],
        forget: Callable[[str], None],
    ) -> None:
        self._unfinished = unfinished
        self._output_queue = output_queue
        self._abort = abort
        self._forget = forget
        self._ready: list[Output] = []  # in reverse

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
        return bool(self._ready) or not self._output_queue.empty()

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Output:
        while not self._ready:
            if not self._unfinished:
                raise StopAsyncIteration
            delivery = await self._output_queue.get()
            if isinstance(delivery, BaseException):
                raise delivery
            self._ready = delivery[::-1]
        output = self._ready.pop()
        if isinstance(output, BeamSearchOutput) or output.finished:
            self._unfinished.discard(output.request_id)
            self._forget(output.request_id)
        return output


class OutputQueues:
    """Where the outputs of each request go: those of one `submit` share a queue. It belongs to the event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Delivery]] = {}  # by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, request_ids: set[str], abort: Callable[[set[str]], None]) -> Outputs:
        """Make a queue for these. abort: ends those that have not finished when their reader goes."""
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._queues.update(dict.fromkeys(request_ids, queue))
        return Outputs(request_ids, queue, abort, self.forget)

    def forget(self, request_id: str) -> None:
        """Its last output has been handed out, or nobody wants it."""
        self._queues.pop(request_id, None)

    def fail(self, request_id: str, error: Exception) -> None:
        """Raise an error where a request's outputs are waited for."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(error)

    def fail_all(self, error: BaseException) -> None:
        """Raise an error wherever outputs are waited for."""
        for queue in set(self._queues.values()):
            queue.put_nowait(error)

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand a step's outputs to those who wait for them."""
        batches: dict[int, tuple[asyncio.Queue[Delivery], list[Output]]] = {}
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                batches.setdefault(id(queue), (queue, []))[1].append(output)
        for queue, batch in batches.values():
            queue.put_nowait(batch)
