"""Which adapters all replicas have: one actor makes changes, one after the other, and knows who takes part.

Replicas call it (`join`, `beat`); it calls them over HTTP, with the secret that they share. It keeps nothing on a disk:
one that is started anew learns from the replicas what they have. A change whose answer nobody has seen is then made
everywhere, where one of them had published it, and else nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quire.distributed.changes import LEASE, NOTHING, Entry
from quire.distributed.steps import Answer, Send
from quire.server.responses.errors import ApiError

logger = logging.getLogger("quire.distributed")

BEAT = 0.5  # seconds between two words of a replica
_SILENT = 4 * BEAT
_POLL = 0.05  # seconds
_TRIES = 3  # of a change, where replicas do not answer

Entries = dict[str, dict[str, Any]]  # by name, as plain data


@dataclass
class _Member:
    """A replica. address: of its server. seen: when it called last. settled: it has what all have."""

    address: str
    seen: float
    settled: bool = False


class AdapterLedger:
    """See above. Its methods are called by handle, in one event loop."""

    def __init__(self, send: Send) -> None:
        """send: has a replica take a step."""
        self._send = send
        self._members: dict[str, _Member] = {}
        self._entries: dict[str, Entry] = {}
        self._changing = False
        self._turn = asyncio.Lock()  # of those who want to change something
        # The replicas of a ledger that went before have so long to say what they have.
        self._certain = time.monotonic() + LEASE + BEAT

    # -- for replicas ----------------------------------------------------------------------------------------------

    async def join(
        self, replica: str, address: str, entries: Entries, clean: bool
    ) -> tuple[Literal["wait", "catch up", "reset", "in"], Entries]:
        """What a replica that wants to take part must do next, which has these entries; and what all have.

        clean: it has no change under way since it was told to join. One that has more than the ledger was here before
        it: the ledger learns from it.
        """
        for name, told in entries.items():
            entry = Entry(**told)
            if self._entries.get(name, NOTHING).version < entry.version:
                self._entries[name] = entry
        self._members[replica] = member = _Member(address, time.monotonic())
        if self._changing or time.monotonic() < self._certain:
            return "wait", {}
        if self._is_behind(entries):
            return "catch up", {name: asdict(entry) for name, entry in self._entries.items()}
        if not clean:
            return "reset", {}
        member.settled = True
        logger.info("replica %s takes part, at %s", replica, address)
        return "in", {}

    async def beat(self, replica: str, version: int) -> bool:
        """A replica's word that it lives, with the newest change that it has. False: it must join (again)."""
        member = self._members.get(replica)
        if member is None or not member.settled:
            return False
        if version != self._version and not self._changing:  # it has missed a change
            member.settled = False
            return False
        member.seen = time.monotonic()
        return True

    async def leave(self, replica: str) -> None:
        """A replica ends."""
        self._members.pop(replica, None)

    # -- for doors -------------------------------------------------------------------------------------------------

    async def members(self) -> dict[str, str]:
        """The replicas that take part, and where they are."""
        now = time.monotonic()
        return {name: one.address for name, one in self._members.items() if one.settled and now - one.seen < LEASE}

    async def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Load an adapter, or name a mixture, on every replica or on none. Status and JSON, as one server answers."""
        return await self._change(body["lora_name"], body)

    async def unload(self, name: str) -> tuple[int, Any]:
        """Forget an adapter or a mixture, everywhere."""
        return await self._change(name, None)

    # -- changes ---------------------------------------------------------------------------------------------------

    async def _change(self, name: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        try:
            async with self._turn:
                for _ in range(_TRIES):  # who did not answer has joined again by then, or is left out
                    async with self._with_all() as members:
                        answer = await self._in_steps(members, name, Entry(self._version + 1, body))
                    if answer.came:
                        break
        except ApiError as error:
            return error.status, error.body
        return answer.status, answer.body

    @asynccontextmanager
    async def _with_all(self) -> AsyncIterator[dict[str, str]]:
        """Around a change: those who take part in it, and nobody joins. Raises ApiError where there are none.

        Who is silent is waited for until it refuses requests with adapters, and is left out then.
        """
        while time.monotonic() < self._certain or self._unsure():
            await asyncio.sleep(_POLL)
        if not self._members:
            raise ApiError(503, "no replica runs that could load adapters: send a request first, or set replicas.min.")
        self._changing = True
        try:
            yield {name: one.address for name, one in self._members.items()}
        finally:
            self._changing = False

    def _unsure(self) -> bool:
        """Whether some may have requests with adapters that no change could reach."""
        now = time.monotonic()
        for name, one in list(self._members.items()):
            if now - one.seen > LEASE + BEAT:
                logger.warning("replica %s is silent: it takes part no more", name)
                del self._members[name]
        return any(not one.settled or now - one.seen > _SILENT for one in self._members.values())

    async def _in_steps(self, members: Mapping[str, str], name: str, entry: Entry) -> Answer:
        """Stage, hold, publish: each on all before the next. The first bad answer, or the first of the last step."""
        told = {"name": name, **asdict(entry)}
        for step in ("stage", "hold"):
            answers = await self._all(members, step, told)
            bad = next((one for one in answers.values() if one.status != 200), None)
            if bad is not None:
                self._unsettle({name: one for name, one in answers.items() if not one.came})
                self._unsettle(await self._all(members, "discard", told))
                return bad
        self._entries[name] = entry  # from here on it is so: who misses the next step must join again
        answers = await self._all(members, "publish", told)
        self._unsettle(answers)
        return replace(min(answers.values(), key=lambda one: one.status != 200), came=True)

    def _unsettle(self, answers: Mapping[str, Answer]) -> None:
        """Let those join again that did not do as they were told."""
        for replica, answer in answers.items():
            if answer.status != 200 and replica in self._members:
                self._members[replica].settled = False

    async def _all(self, members: Mapping[str, str], step: str, told: dict[str, Any]) -> dict[str, Answer]:
        answers = await asyncio.gather(*(self._send(name, address, step, told) for name, address in members.items()))
        return dict(zip(members, answers, strict=True))

    @property
    def _version(self) -> int:
        return max((entry.version for entry in self._entries.values()), default=0)

    def _is_behind(self, entries: Entries) -> bool:
        return any(entries.get(name, {"version": 0})["version"] < one.version for name, one in self._entries.items())
