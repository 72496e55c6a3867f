"""Which adapters all replicas have: one actor makes changes, one after the other, and knows who takes part.

Replicas call it (`join`, `beat`); it calls them over HTTP, with the secret that they share. It keeps nothing on a disk:
one that is started anew learns from the replicas what they have. A change whose answer nobody has seen is then made
everywhere, where one of them had published it, and else nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from quire.distributed.steps import LEASE, NOTHING, Answer, Entry, Send
from quire.server.responses.errors import ApiError

logger = logging.getLogger("quire.distributed")

BEAT = 0.5  # seconds between two words of a replica
_SILENT = 4 * BEAT
_POLL = 0.05  # seconds
_TRIES = 3  # of a change, where replicas do not answer

Entries = dict[str, dict[str, Any]]  # by name, as plain data


@dataclass
class _Member:
    """A replica. address: of its server. called: when it called last. settled: it has what all have.

    leased: when it was last told that it may have requests with adapters, which then holds for `LEASE`.
    asked: since when it has been asking to join.
    """

    address: str
    called: float
    leased: float
    asked: float
    settled: bool = False
    differed: bool = False  # by its last word it had not the newest change

    def unsettle(self) -> None:
        """It must join again."""
        if self.settled:
            self.settled, self.differed, self.asked = False, False, time.monotonic()


class AdapterLedger:
    """See above. Its methods are called by handle, in one event loop."""

    def __init__(self, send: Send) -> None:
        """send: has a replica take a step."""
        self._send = send
        self._members: dict[str, _Member] = {}
        self._entries: dict[str, Entry] = {}
        self._changing: Collection[str] | None = None  # the replicas of the change that is under way
        self._last = 0  # number that a change had
        self._turn = asyncio.Lock()  # of those who want to change something
        # The replicas of a ledger that went before have so long to say what they have.
        self._certain = time.monotonic() + LEASE + BEAT

    # -- for replicas ----------------------------------------------------------------------------------------------

    async def join(
        self, replica: str, address: str, entries: Entries, clean: bool
    ) -> tuple[Literal["wait", "stand by", "catch up", "reset", "in"], Entries]:
        """What a replica that wants to take part must do next, which has these entries; and what all have.

        clean: it has no change under way since it was told to join. One that has more than the ledger was here before
        it: the ledger learns from it.
        """
        now = time.monotonic()
        member = self._members.setdefault(replica, _Member(address, now, -inf, now))
        member.unsettle()
        member.called = now
        if self._changing is None:
            self._learn(entries)
        elif replica not in self._changing:
            return "stand by", {}  # it may have what is older than what others have in a moment
        if self._changing is not None or now < self._certain:
            member.leased = now
            return "wait", {}
        if self._is_behind(entries):
            return "catch up", {name: asdict(entry) for name, entry in self._entries.items()}
        if not clean:
            return "reset", {}
        member.settled, member.leased = True, now
        logger.info("replica %s takes part, at %s", replica, address)
        return "in", {}

    def _learn(self, entries: Entries) -> None:
        told = {name: Entry(**one) for name, one in entries.items()}
        newer = {name: one for name, one in told.items() if self._entries.get(name, NOTHING).version < one.version}
        self._entries.update(newer)
        if newer:
            for member in self._members.values():  # who lacks it is told when it joins
                member.unsettle()

    async def beat(self, replica: str, version: int) -> bool:
        """A replica's word that it lives, with the newest change that it has. False: it must join (again)."""
        member = self._members.get(replica)
        if member is None or not member.settled:
            return False
        differs = version != self._version and self._changing is None
        if differs and member.differed:  # it has missed a change; once, its word may have been older than that
            member.unsettle()
            return False
        member.differed = differs
        member.called = member.leased = time.monotonic()
        return True

    async def leave(self, replica: str) -> None:
        """A replica ends."""
        self._members.pop(replica, None)

    # -- for doors -------------------------------------------------------------------------------------------------

    async def members(self) -> dict[str, str]:
        """The replicas that take part, and where they are."""
        now = time.monotonic()
        return {name: one.address for name, one in self._members.items() if one.settled and now - one.called < LEASE}

    async def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Load an adapter, or name a mixture, on every replica or on none. Status and JSON, as one server answers."""
        return await self._change(body["lora_name"], body)

    async def unload(self, name: str, number: int | None = None) -> tuple[int, Any]:
        """Forget an adapter or a mixture, everywhere. number: that the adapter must have."""
        return await self._change(name, None, number)

    async def forget(self, name: str) -> bool:
        """Let a name stand for nothing where no replica takes part, so that who joins does not need its files. False:
        some do, or nothing is known of it."""
        known = self._entries.get(name, NOTHING).body is not None
        if not known or self._changing or any(one.settled for one in self._members.values()):
            return False
        self._entries[name] = Entry(self._next(), None)
        return True

    # -- changes ---------------------------------------------------------------------------------------------------

    async def _change(self, name: str, body: dict[str, Any] | None, number: int | None = None) -> tuple[int, Any]:
        try:
            async with self._turn:
                for _ in range(_TRIES):  # who did not answer has joined again by then, or is left out
                    async with self._with_all() as members:
                        answer = await self._in_steps(members, name, Entry(self._next(), body), number)
                    if answer.came:
                        break
        except ApiError as error:
            return error.status, error.body
        return answer.status, answer.body

    @asynccontextmanager
    async def _with_all(self) -> AsyncIterator[dict[str, str]]:
        """Around a change: those who take part in it, and nobody joins. Raises ApiError where there are none.

        Who is silent is waited for until it refuses requests with adapters, and is left out then; who wants to join has
        as long for it.
        """
        while time.monotonic() < self._certain or self._unsure():
            await asyncio.sleep(_POLL)
        settled = {name: one.address for name, one in self._members.items() if one.settled}
        if not settled:
            raise ApiError(503, "no replica runs that could load adapters: send a request first, or set replicas.min.")
        self._changing = frozenset(settled)
        try:
            yield settled
        finally:
            self._changing = None

    def _unsure(self) -> bool:
        """Whether some may have requests with adapters that no change could reach."""
        late = time.monotonic() - LEASE - BEAT
        for name, one in list(self._members.items()):
            if max(one.called, one.leased) < late:
                logger.warning("replica %s is silent: it takes part no more", name)
                del self._members[name]
        silent = time.monotonic() - _SILENT
        return any(
            one.called < silent if one.settled else max(one.leased, one.asked) >= late for one in self._members.values()
        )

    def _next(self) -> int:
        """A change's number. No other change has it: neither one that failed, nor one of a ledger before this one, as
        numbers begin with the time (milliseconds since 1970)."""
        self._last = max(self._last + 1, self._version + 1, int(time.time() * 1000))
        return self._last

    async def _in_steps(self, members: Mapping[str, str], name: str, entry: Entry, number: int | None) -> Answer:
        """Stage, hold, publish: each on all before the next. The first bad answer, or the first of the last step."""
        told = {"name": name, **asdict(entry), "number": number}
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
                self._members[replica].unsettle()

    async def _all(self, members: Mapping[str, str], step: str, told: dict[str, Any]) -> dict[str, Answer]:
        answers = await asyncio.gather(*(self._send(name, address, step, told) for name, address in members.items()))
        return dict(zip(members, answers, strict=True))

    @property
    def _version(self) -> int:
        return max((entry.version for entry in self._entries.values()), default=0)

    def _is_behind(self, entries: Entries) -> bool:
        return any(entries.get(name, {"version": 0})["version"] < one.version for name, one in self._entries.items())
