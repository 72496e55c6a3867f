"""Responses of /v1/responses that are kept, so that a later request can go on from one: in main memory, in a bounded
number of bytes. What nobody has used for longest goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import OverloadedError
from quire.server.responses.errors import ApiError

FLAG = "--response-store-bytes"
_OVERHEAD = 1024  # bytes of a response beside its texts, and a little more: objects, names, its place in the table
_OVERHEAD_OF_EVENT = 64
_MAX_CHAIN = 10_000  # responses, each of which goes on from the one before


class Running(Protocol):
    """A response in the making."""

    def snapshot(self) -> dict[str, Any]:
        """Its body as it is now."""

    def cancel(self) -> None:
        """End it: it is finished with what it has."""


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A response and what it answered.

    owner: who may ask for it; None: whoever knows its name.
    previous: the response that it goes on from.
    items: its own input, as JSON.
    body: as JSON; None while it is in the making.
    running: who makes it.
    events: of its stream, as they are sent, where it can be asked for again.  complete: there are no more of them.
    kept: it is in the store.
    """

    id: str
    owner: bytes | None
    previous: str | None
    items: bytes
    body: bytes | None = None
    running: Running | None = None
    events: list[bytes] | None = None
    complete: bool = False
    size: int = 0
    kept: bool = False
    _news: asyncio.Event | None = None

    async def more(self) -> None:
        """Wait for more of its stream."""
        if self._news is None:  # few are waited for, and one of these is larger than all else
            self._news = asyncio.Event()
        await self._news.wait()

    def wake(self) -> None:
        """There is more."""
        news, self._news = self._news, None
        if news is not None:
            news.set()


class ResponseStore:
    """By id. For one event loop.

    Its bytes are counted: those of all JSON in it, and an allowance for what Python has beside.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: 0 keeps nothing."""
        self.most_bytes = most_bytes
        self.bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # what was used last is last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_on(self) -> bool:
        return self.most_bytes > 0

    def find(self, name: str, owner: bytes | None) -> StoredResponse | None:
        """None: there is none of this id, it has been forgotten, or it is another's."""
        stored = self._kept.get(name)
        if stored is None or stored.owner != owner:
            return None
        self._kept.move_to_end(name)
        return stored

    def chain(self, name: str, owner: bytes | None, field: str) -> list[StoredResponse]:
        """The response of this id after all that it goes on from, the first of them first.

        Raises ApiError, about a field of a request, where one of them is not there (any more) or is in the making.
        """
        found: list[StoredResponse] = []
        wanted: str | None = name
        while wanted is not None:
            stored = self._kept.get(wanted)
            if stored is None or stored.owner != owner:
                why = "" if wanted == name else f", which {name!r} goes on from"
                raise ApiError(
                    400,
                    f"{field}: there is no response {wanted[:200]!r}{why}, or it has been forgotten.",
                    field,
                    "previous_response_not_found",
                )
            if stored.body is None:
                raise ApiError(400, f"{field}: {wanted!r} is still in the making.", field)
            if len(found) == _MAX_CHAIN:
                raise ApiError(400, f"{field}: {name!r} goes on from more than {_MAX_CHAIN} responses.", field)
            found.append(stored)
            wanted = stored.previous
        found.reverse()
        for one in found:  # one that others go on from is older than they are, and not for that forgotten before others
            self._kept.move_to_end(one.id)
        return found

    def begin(self, stored: StoredResponse) -> None:
        """Keep a response in the making. Raises ApiError, OverloadedError where there is no place for it."""
        if stored.id in self._kept:
            raise ApiError(400, f"request_id: there is a response {stored.id!r} already.", "request_id")
        stored.size = self._size(stored)
        if stored.size > self.most_bytes:
            raise ApiError(
                400,
                f"store: this takes {stored.size} bytes and all that is kept may take {self.most_bytes} ({FLAG}): "
                "ask for store=false.",
                "store",
            )
        if not self._make_room(stored.size):
            raise OverloadedError(f"responses in the making take all of what may be kept ({FLAG}): try again later", 5)
        self._kept[stored.id] = stored
        self.bytes += stored.size
        stored.kept = True

    def append(self, stored: StoredResponse, event: bytes) -> bool:
        """More of its stream. False: there is no place for it."""
        assert stored.events is not None
        if stored.kept:
            size = len(event) + _OVERHEAD_OF_EVENT
            if not self._make_room(size, stored):
                return False
            stored.size += size
            self.bytes += size
        stored.events.append(event)
        stored.wake()
        return True

    def complete(self, stored: StoredResponse) -> None:
        """There is no more of its stream."""
        stored.complete = True
        stored.wake()

    def drop_events(self, stored: StoredResponse) -> None:
        """Its stream cannot be asked for again."""
        size = sum(len(event) + _OVERHEAD_OF_EVENT for event in stored.events or ())
        stored.events = None
        if stored.kept:
            stored.size -= size
            self.bytes -= size
        stored.wake()

    def finish(self, stored: StoredResponse, body: bytes) -> bool:
        """A response has ended. False: it is not kept (any more), as there is no place for its body."""
        if stored.kept:
            if self._make_room(len(body), stored):
                stored.size += len(body)
                self.bytes += len(body)
                self._kept.move_to_end(stored.id)
            else:
                self.forget(stored)
        stored.body, stored.running = body, None
        return stored.kept

    def forget(self, stored: StoredResponse) -> None:
        """It is no longer kept; whoever reads it reads on."""
        if stored.kept:
            stored.kept = False
            del self._kept[stored.id]
            self.bytes -= stored.size

    def _make_room(self, size: int, spared: StoredResponse | None = None) -> bool:
        """For so many more bytes: forget what was not used for longest, but nothing that is in the making."""
        excess = self.bytes + size - self.most_bytes
        leaving = []
        for stored in self._kept.values():
            if excess <= 0:
                break
            if stored.body is not None and stored is not spared:
                leaving.append(stored)
                excess -= stored.size
        if excess > 0:
            return False
        for stored in leaving:
            self.forget(stored)
        return True

    @staticmethod
    def _size(stored: StoredResponse) -> int:
        return _OVERHEAD + len(stored.items) + len(stored.body or b"")
