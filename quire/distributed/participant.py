"""A replica's word with the ledger: it joins, says that it lives, and joins again where it has missed something."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from quire.distributed.changes import ReplicaAdapters
from quire.distributed.ledger import BEAT
from quire.distributed.steps import Entry

logger = logging.getLogger("quire.distributed")

_LAST_WORD = 2.0  # seconds
_LOST = 60.0  # seconds without the others, after which another replica does better


class Participant:
    """Takes part for one replica, from `start` to `leave`."""

    def __init__(self, name: str, address: str, adapters: ReplicaAdapters, ledger: Any) -> None:
        """address: of the replica's server. ledger: a handle."""
        self._name = name
        self._address = address
        self._adapters = adapters
        self._ledger = ledger
        self._joined = asyncio.Event()
        self._left = time.monotonic()  # when it took part last
        self._takes_part = False
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until it has what the others have."""
        self._life = asyncio.ensure_future(self._take_part())
        await self._joined.wait()

    def health_error(self) -> str | None:
        """Why the replica is of no use: it has not had what the others have for long. None: it has, or will."""
        seconds = time.monotonic() - self._left
        if self._takes_part or not self._joined.is_set() or seconds < _LOST:
            return None
        return f"it has taken no part in changes of adapters for {seconds:.0f} s"

    async def leave(self) -> None:
        """The replica ends."""
        if self._life is not None:
            self._life.cancel()
        with suppress(Exception):  # Ray has many; and the ledger may have ended before
            await asyncio.wait_for(self._ledger.leave.remote(self._name), _LAST_WORD)

    async def _take_part(self) -> None:
        while True:
            try:
                await self._join()
                self._takes_part = True
                self._joined.set()
                await self._stay()
            except Exception as error:  # Ray has many; and until all is well, requests with adapters are refused
                logger.warning("no word with the ledger (%s: %s)", type(error).__name__, error)
            if self._takes_part:
                self._takes_part, self._left = False, time.monotonic()
            await asyncio.sleep(BEAT)

    async def _stay(self) -> None:
        """Until this replica must join again."""
        while True:
            asked = time.monotonic()  # before, as the ledger's time begins when it is asked
            if not await self._ledger.beat.remote(self._name, self._adapters.version):
                return
            self._adapters.heard(asked)
            await asyncio.sleep(BEAT)

    async def _join(self) -> None:
        """Raises what Ray raises, and ApiError for an adapter that the others have and that cannot be loaded here."""
        clean = False
        while True:
            asked = time.monotonic()
            entries = {name: asdict(entry) for name, entry in self._adapters.entries.items()}
            said, told = await self._ledger.join.remote(self._name, self._address, entries, clean)
            if said == "in":
                return self._adapters.heard(asked)
            if said == "catch up":
                await self._adapters.catch_up({name: Entry(**one) for name, one in told.items()})
            elif said == "reset":
                self._adapters.reset()
                clean = True
            else:
                if said == "wait" and self._joined.is_set():
                    self._adapters.heard(asked)  # the ledger makes no change without this replica meanwhile
                await asyncio.sleep(BEAT)
