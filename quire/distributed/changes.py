"""A replica's part in changes of adapters: they are loaded by every replica or by none.

The ledger (`ledger.py`) makes a change in steps, each of which all replicas have answered before the next begins:
every replica *stages* the adapter, then every one *holds* the requests that name it, then every one *publishes* it and
lets them go on. So no request begins with an older version once another has begun with a newer one, on whichever
replica. A replica that has lost touch with the ledger refuses requests with adapters until it has caught up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.server.responses.errors import ApiError
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.served_models import ServedModels, StagedModel

LEASE = 5.0  # seconds without word of the ledger, after which requests with adapters are refused
_LONGEST_HOLD = 30.0  # seconds that a request waits for a change to end


@dataclass(frozen=True)
class Entry:
    """What a name stands for. version: of the change that made it so, counted by the ledger. body: what was asked for,
    as `LoadAdapterRequest` has it; None: the name was unloaded."""

    version: int
    body: dict[str, Any] | None


NOTHING = Entry(0, None)


class ReplicaAdapters:
    """The names of one replica, changed by the ledger alone. Everything here runs in its event loop.

    entries: what was published here; names that the configuration loads are among them once they have changed.
    """

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._staged: dict[int, StagedModel] = {}
        self._held: dict[str, asyncio.Event] = {}
        self._heard = time.monotonic()
        self.entries: dict[str, Entry] = {}
        served.gate = self.wait

    @property
    def version(self) -> int:
        """Of the newest change that was made here."""
        return max((entry.version for entry in self.entries.values()), default=0)

    def heard(self, asked: float) -> None:
        """The ledger was asked then (`time.monotonic()`), and makes no change without this replica."""
        self._heard = asked

    async def wait(self, names: frozenset[str]) -> None:
        """Until no change of these is under way. Raises ApiError 503 where that takes too long, or where others may
        have changed them."""
        try:
            async with asyncio.timeout(_LONGEST_HOLD):
                while held := next((self._held[name] for name in names if name in self._held), None):
                    await held.wait()
        except TimeoutError:
            raise _unsure(f"the adapters {sorted(names)} are being changed") from None
        if time.monotonic() - self._heard > LEASE:
            raise _unsure("this replica has lost touch with the others, and they may have other adapters by now")

    # -- steps of a change -----------------------------------------------------------------------------------------

    async def stage(self, name: str, entry: Entry) -> None:
        """Read and check an adapter, or a mixture; or whether there is one to unload. Raises ApiError."""
        if entry.body is not None:
            self._staged[entry.version] = await self._served.stage(LoadAdapterRequest(**entry.body))
        elif not self._served.has(name):
            raise ApiError(404, f"lora_name: no adapter {name[:200]!r} is loaded.", "lora_name", "model_not_found")

    def hold(self, name: str) -> None:
        """Let requests that name it wait."""
        self._held.setdefault(name, asyncio.Event())

    def discard(self, name: str, entry: Entry) -> None:
        """Nothing becomes of a change."""
        self._staged.pop(entry.version, None)
        self._release(name)

    async def publish(self, name: str, entry: Entry) -> dict[str, Any]:
        """Let a name stand for what was staged, or for nothing, and its requests go on. What the route answers.

        Raises ApiError; then this replica must join again.
        """
        if entry.body is not None:
            answer = {"status": "loaded", **self._served.publish(self._staged.pop(entry.version))}
            self._made(name, entry)
            return answer
        unloading = asyncio.ensure_future(self._served.unload(UnloadAdapterRequest(lora_name=name)))
        await asyncio.sleep(0)  # the name is gone; requests that hold it are waited for
        self._made(name, entry)
        return {"status": "unloaded", **await unloading}

    def _made(self, name: str, entry: Entry) -> None:
        self.entries[name] = entry
        self._release(name)

    def _release(self, name: str) -> None:
        if name in self._held:
            self._held.pop(name).set()

    # -- joining ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Changes that were under way are none any more: the ledger makes none with this replica now."""
        self._staged.clear()
        for name in list(self._held):
            self._release(name)

    async def catch_up(self, entries: Mapping[str, Entry]) -> None:
        """Have what the others have. Raises ApiError for an adapter that cannot be loaded here."""
        for name, entry in sorted(entries.items(), key=lambda item: item[1].version):
            if self.entries.get(name, NOTHING).version < entry.version:
                self.hold(name)
                await self._take(name, entry)
                self._made(name, entry)

    async def _take(self, name: str, entry: Entry) -> None:
        if entry.body is None or entry.body.get("adapters") is not None:
            with suppress(ApiError):  # there is none
                await self._served.unload(UnloadAdapterRequest(lora_name=name))
        if entry.body is not None:
            body = LoadAdapterRequest(**{**entry.body, "load_inplace": True})
            self._served.publish(await self._served.stage(body))


def _unsure(why: str) -> ApiError:
    return ApiError(503, f"{why}: try again.", code="adapters_changing", headers={"Retry-After": "1"})
