"""What doors, the ledger and replicas say to each other, beside clients' requests.

It imports no engine: the ledger would take seconds longer to begin, and requests with adapters wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from quire.server.responses.errors import ApiError

logger = logging.getLogger("quire.distributed")

# Headers of requests between them; clients' own of these names go no further than the door.
SECRET = "x-quire-secret"  # known to this application's doors, ledger and replicas alone
TICKET = "x-quire-ticket"  # of an admission, which ends with the request that brings it
AGAIN = "x-quire-again"  # of an answer of a replica that is not certain of its adapters: another may be
STEPS = "/.quire/"  # the path before the steps of a change

LEASE = 5.0  # seconds without word of the ledger, after which a replica refuses requests with adapters

_LONG = 600.0  # seconds that a replica may take to read an adapter, or to let go of one
_SHORT = 10.0  # seconds that it may take for anything else


@dataclass(frozen=True)
class Entry:
    """What a name stands for. version: of the change that made it so, counted by the ledger. body: what was asked for,
    as `LoadAdapterRequest` has it; None: the name was unloaded."""

    version: int
    body: dict[str, Any] | None


NOTHING = Entry(0, None)


@dataclass(frozen=True)
class Answer:
    """Of a replica to a step. body: JSON. came: False where it did not answer."""

    status: int
    body: Any
    came: bool = True


# Has a replica (its name, its address) take a step of a change that it is told.
Send = Callable[[str, str, str, dict[str, Any]], Awaitable[Answer]]


class HttpSteps:
    """Sends steps to replicas' servers. One that does not answer counts as one that refuses, with status 503."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._http: Any = None

    async def __call__(self, replica: str, address: str, step: str, told: dict[str, Any]) -> Answer:
        import aiohttp

        if self._http is None:
            self._http = aiohttp.ClientSession(headers={SECRET: self._secret})
        seconds = aiohttp.ClientTimeout(_LONG if step in ("stage", "publish") else _SHORT)
        try:
            async with self._http.post(f"{address}{STEPS}{step}", json=told, timeout=seconds) as answer:
                return Answer(answer.status, await answer.json())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("replica %s: %s: %s %s", replica, step, type(error).__name__, error)
            gone = ApiError(503, f"a replica did not answer ({type(error).__name__}): nothing was changed; try again.")
            return Answer(gone.status, gone.body, came=False)
