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
from typing import Any

from quire.distributed.steps import AGAIN, LEASE, NOTHING, Entry
from quire.server.responses.errors import ApiError
from quire.server.schemas.openai import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.served_models import ServedModels, StagedModel

_LONGEST_HOLD = 30.0  # seconds that a request waits for a change to end


class ReplicaAdapters:
    """The names of one replica, changed by the ledger alone. Everything here runs in its event loop.

    entries: what was published here; names that the configuration loads are among them once they have changed.
    """

    def __init__(self, served: ServedModels) -> None:
        self._served = served
        self._staged: dict[
            int, StagedModel | None
        ] = {}  # by change; None: it is being read, or there is nothing to read
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

    async def stage(self, name: str, entry: Entry, number: int | None = None) -> None:
        """Read and check an adapter, or a mixture; or whether there is one to unload. Raises ApiError.

        number: that the adapter to unload must have, where it was told.
        """
        if entry.body is None:
            self._served.check_unload(UnloadAdapterRequest(lora_name=name, lora_int_id=number))
        self._staged[entry.version] = None
        if entry.body is not None:
            try:
                staged = await self._served.stage(LoadAdapterRequest(**entry.body))
            except BaseException:
                self._staged.pop(entry.version, None)
                raise
            self._check_wanted(entry)  # it may have taken longer than the ledger lived, or waited
            self._staged[entry.version] = staged

    def hold(self, name: str, entry: Entry) -> None:
        """Let requests that name it wait. Raises ApiError for a change that is none any more: nobody would end it."""
        self._check_wanted(entry)
        self._hold(name)

    def _check_wanted(self, entry: Entry) -> None:
        if entry.version not in self._staged:
            raise ApiError(503, f"change {entry.version} has ended: nothing was changed; try again.")

    def _hold(self, name: str) -> None:
        self._held.setdefault(name, asyncio.Event())

    def discard(self, name: str, entry: Entry) -> None:
        """Nothing becomes of a change."""
        self._staged.pop(entry.version, None)
        self._release(name)

    async def publish(self, name: str, entry: Entry) -> dict[str, Any]:
        """Let a name stand for what was staged, or for nothing, and its requests go on. What the route answers.

        Raises ApiError; then this replica must join again.
        """
        self._check_wanted(entry)
        staged = self._staged.pop(entry.version)
        if staged is not None:
            answer = {"status": "loaded", **self._served.publish(staged)}
            self._made(name, entry)
            return answer
        unloading = asyncio.ensure_future(self._served.unload(UnloadAdapterRequest(lora_name=name)))
        await asyncio.sleep(0)  # the name is gone; requests that hold it are waited for
        if not self._served.has(name):
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
        """Have what the others have. Raises ApiError for an adapter that cannot be loaded here.

        Mixtures need their adapters: they go first, and come last, whatever was changed when.
        """
        missed = {name: one for name, one in entries.items() if self.entries.get(name, NOTHING).version < one.version}
        for name in missed:
            self._hold(name)
        for name in sorted(missed, key=self._served.is_mixture, reverse=True):
            if not _is_adapter(missed[name]):
                with suppress(ApiError):  # there is none
                    await self._served.unload(UnloadAdapterRequest(lora_name=name))
        for name, entry in sorted(missed.items(), key=lambda item: (not _is_adapter(item[1]), item[1].version)):
            if entry.body is not None:
                body = LoadAdapterRequest(**{**entry.body, "load_inplace": True})
                self._served.publish(await self._served.stage(body))
            elif self._served.has(name):
                raise ApiError(400, f"lora_name: {name!r} cannot be unloaded here, as the others did.", "lora_name")
            self._made(name, entry)


def _is_adapter(entry: Entry) -> bool:
    return entry.body is not None and entry.body.get("adapters") is None


def _unsure(why: str) -> ApiError:
    return ApiError(503, f"{why}: try again.", code="adapters_changing", headers={"Retry-After": "1", AGAIN: "1"})
