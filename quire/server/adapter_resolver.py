"""Adapters that are loaded when a request first names them, as vLLM's resolvers do it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from quire.errors import AdapterError, OverloadedError
from quire.platform.engine.async_engine import AsyncEngine
from quire.server.adapter_sources import AdapterSources
from quire.server.responses.errors import ApiError, as_api_error

_MOST = 256  # adapters that are here because requests named them
_AT_ONCE = 2  # that are looked for and read
_MOST_ASKED = 64  # names that are looked for or wait for it
_FORGET = 10.0  # seconds after which what was not there is looked for again
_MOST_FAILED = 1024  # names that were not there


class AdapterResolver:
    """For one event loop. Each name is looked for once, however many requests ask for it, and not again for a while
    where it is not there: requests for what does not exist must not keep the disk busy.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        places: AdapterSources,
        needed: Callable[[str], bool] = lambda name: False,
        most: int = _MOST,
        forget: float = _FORGET,
    ) -> None:
        """needed: whether an adapter must stay. most: adapters kept; beyond, one that no request uses goes, the least
        recently named first. forget: seconds that a failure is remembered.
        """
        self._engine = engine
        self._places = places
        self._needed = needed
        self._most = most
        self._forget = forget
        self._asked: dict[str, asyncio.Task[ApiError | None]] = {}
        self._failed: OrderedDict[str, tuple[float, ApiError | None]] = OrderedDict()
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def used(self, name: str) -> None:
        """A request has named an adapter that is there."""
        if name in self._loaded:
            self._loaded.move_to_end(name)

    async def load(self, name: str) -> None:
        """Load the adapter of this name, if there is one. Raises ApiError for one that is refused, and OverloadedError.

        Who stops waiting stops nobody else.
        """
        if not self._places.may_have(name):
            return
        until, error = self._failed.get(name, (0.0, None))
        if time.monotonic() < until:
            if error is not None:
                raise error.again()
            return
        task = self._asked.get(name)
        if task is None:
            if len(self._asked) >= _MOST_ASKED:
                raise OverloadedError(f"{_MOST_ASKED} adapters are being looked for: try again later", 2)
            task = self._asked[name] = asyncio.ensure_future(self._load(name))
            task.add_done_callback(lambda _: self._asked.pop(name, None))
        error = await asyncio.shield(task)
        if error is not None:
            raise error.again()

    async def _load(self, name: str) -> ApiError | None:
        """What it was refused for; None: it is there, or there is none."""
        error = None
        try:
            async with self._turns:
                folder = await asyncio.to_thread(self._places.find, name)
                if folder is not None:
                    await self._make_room()
                    await self._engine.load_lora_adapter(name, str(folder))
                    self._loaded[name] = None
                    return None
        except AdapterError as reason:
            adapters = self._engine.llm_engine.adapters
            if adapters is not None and adapters.knows(name):  # somebody else was faster
                return None
            error = as_api_error(reason)
        except Exception as reason:  # not the name's fault: nothing is remembered
            return as_api_error(reason)
        self._failed[name] = (time.monotonic() + self._forget, error)
        self._failed.move_to_end(name)
        if len(self._failed) > _MOST_FAILED:
            self._failed.popitem(last=False)
        return error

    async def _make_room(self) -> None:
        held = {info.name: info.requests for info in self._engine.list_lora_adapters()}
        for name in [name for name in self._loaded if name not in held]:
            del self._loaded[name]
        for name in list(self._loaded):
            if len(self._loaded) < self._most:
                return
            if not held[name] and not self._needed(name):
                del self._loaded[name]
                await self._engine.unload_lora_adapter(name, 0.0)
        if len(self._loaded) >= self._most:
            raise OverloadedError(f"{self._most} adapters are in use, which is the limit: try again later", 5)
