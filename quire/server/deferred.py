"""Answers that nobody waits for: kept for a while, in bounded number and size, for who knows their names."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.config import ServerConfig
from quire.errors import OverloadedError
from quire.server.paths import given_keys
from quire.server.responses.errors import ApiError, as_api_error

_SECONDS = 600.0  # that an answer is kept
_MOST = 1024  # answers, ready or not
_BYTES = 64 << 20  # of those that are ready


@dataclass(eq=False)
class Kept:
    """An answer, or why there is none; neither: it is not ready. owner: who may ask for it; None: whoever knows it."""

    owner: bytes | None
    body: bytes | None = None
    error: ApiError | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None  # at its end it is forgotten


def owner_of(scope: Scope, config: ServerConfig) -> bytes | None:
    """Who asks, by the key: another key does not open what this one began. None: the server has no keys."""
    if not config.api_keys and config.admin_api_key is None:
        return None
    return hashlib.sha256(b" ".join(dict.fromkeys(given_keys(scope)))).digest()  # keys have no spaces


class DeferredAnswers:
    """By name. Names are drawn at random: nobody can guess another's. For one event loop."""

    def __init__(self, seconds: float = _SECONDS, most: int = _MOST, most_bytes: int = _BYTES) -> None:
        """seconds: that an answer is kept once it is ready. most: answers. most_bytes: of their bodies; when there are
        more, the oldest go.
        """
        self._seconds = seconds
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str, Kept] = {}  # those that are ready in the order in which they became so
        self._bytes = 0

    def check_room(self) -> None:
        """Raise OverloadedError while as many are not ready as may be kept."""
        if sum(kept.task is not None for kept in self._kept.values()) >= self._most:
            raise OverloadedError(f"{self._most} answers that nobody waits for are not ready: try again later", 5)

    def add(self, work: Coroutine[Any, Any, dict[str, Any]], owner: bytes | None, prefix: str = "") -> str:
        """Keep what some work comes to. Returns its name, which begins with `prefix`."""
        name, kept = prefix + secrets.token_hex(16), Kept(owner)
        self._kept[name] = kept
        kept.task = asyncio.ensure_future(self._wait(name, kept, work))
        self._make_room()
        return name

    def find(self, name: str, owner: bytes | None) -> Kept | None:
        """None: there is none of this name, or it is another's."""
        kept = self._kept.get(name)
        return kept if kept is not None and kept.owner == owner else None

    async def _wait(self, name: str, kept: Kept, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            answer = await work
            # Of half a surrogate pair JSON has the escape.
            kept.body = json.dumps({**answer, "request_id": name}, separators=(",", ":")).encode()
        except asyncio.CancelledError:
            kept.error = ApiError(503, "the server is shutting down", code="engine_unavailable")
            raise
        except Exception as error:
            kept.error = as_api_error(error).again()  # without the frames that it went through, and the request in them
        finally:
            kept.task = None
            self._bytes += len(kept.body or b"")
            self._kept[name] = self._kept.pop(name)
            kept.timer = asyncio.get_running_loop().call_later(self._seconds, self._forget, name)
            self._make_room()

    def _make_room(self) -> None:
        ready = [name for name, kept in self._kept.items() if kept.task is None]
        for name in ready:
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                break
            self._forget(name)

    def _forget(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._bytes -= len(kept.body or b"")
        if kept.timer is not None:
            kept.timer.cancel()
