"""Work for a client, that ends when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

_T = TypeVar("_T")

# Of ASGI's scope: a function that is given what is to be called when the client has gone, and returns what takes that
# back. Where there is none, a task waits for ASGI's own message.
EXTENSION = "quire.when_gone"


class ClientGoneError(Exception):
    """Nobody listens any more."""


async def while_there(scope: Scope, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do some work while the client is there; cancelled, and ClientGoneError raised, as soon as it is not.

    It is done by the task that asks: one of its own would cost more than many an answer.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled, gone = task.cancelling(), False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    take_back = scope.get("extensions", {}).get(EXTENSION, _waiting(receive))(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == cancelled + 1:  # nobody else has cancelled it
            raise ClientGoneError from None
        raise
    finally:
        take_back()
        if gone:
            task.uncancel()


def _waiting(receive: Receive) -> Callable[[Callable[[], object]], Callable[[], object]]:
    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def when_gone(call: Callable[[], object]) -> Callable[[], object]:
        waiting = asyncio.ensure_future(wait())

        def told(ended: asyncio.Future[None]) -> None:
            if not ended.cancelled():
                ended.exception()
                call()

        waiting.add_done_callback(told)

        def take_back() -> None:
            waiting.remove_done_callback(told)
            waiting.cancel()

        return take_back

    return when_gone
