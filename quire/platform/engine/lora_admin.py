"""Adapters by their names: loading and unloading them, and which versions requests hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import AdapterError, QuireError, RequestError, UnknownAdapterError
from quire.lora import AdapterInfo, AdapterRegistry, LoadReport, LoRARequest, StagedAdapter
from quire.platform.engine.builder import resolve_adapter
from quire.platform.engine.sleep import Sleep
from quire.platform.scheduling.plan import StepPlan
from quire.types import AdapterUse


class LoRAAdmin:
    """What callers do with adapters. Any thread may call all of it, while another steps.

    registry: None where enable_lora is not set; most methods raise AdapterError then.
    """

    def __init__(self, registry: AdapterRegistry | None, config: EngineConfig, sleep: Sleep) -> None:
        self.registry = registry
        self._config = config
        self._sleep = sleep
        self._lock = threading.Lock()  # while a request takes hold of its adapters, or lets go of them
        self._held: dict[int, AdapterUse] = {}  # by the serial number of the request that holds them

    # -- for callers ----------------------------------------------------------------------------------------------

    def load(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False, lora_int_id: int | None = None
    ) -> LoadReport:
        """Load an adapter from a folder and let `name` stand for it. See `LLMEngine.load_lora_adapter`."""
        with self._sleep.awake():
            return self._required().load(name, self._folder(path), load_inplace, pinned, lora_int_id, path)

    def stage(self, name: str, path: str, load_inplace: bool = False) -> StagedAdapter:
        """Read an adapter that `name` is to stand for once it is published. Raises AdapterError."""
        with self._sleep.awake():
            return self._required().stage(name, self._folder(path), load_inplace, source=path)

    def publish(self, staged: StagedAdapter, gone: Callable[[], object] | None = None) -> LoadReport:
        """Let a name stand for what was staged. Raises AdapterError.

        gone: called, in any thread, once nobody needs its files any more.
        """
        with self._sleep.awake():
            return self._required().publish(staged, gone)

    def load_for(self, request: LoRARequest) -> None:
        """Load what a request names by its path, unless it is loaded and the request does not want it loaded again.

        Raises AdapterError.
        """
        if request.load_inplace and request.lora_path is not None:
            self.load(request.lora_name, request.lora_path, True, lora_int_id=request.lora_int_id)
        with self._sleep.awake():
            self._required().ensure(request, self._folder)

    def check_mixture(self, request: LoRARequest) -> None:
        """Whether a mixture's adapters are there and can be mixed. Raises QuireError."""
        registry = self._required()
        with self._lock:
            registry.release(registry.acquire(request))

    def unload(self, name: str) -> int:
        """Forget an adapter. See `LLMEngine.unload_lora_adapter`."""
        return self._required().unload(name)

    def freed_bytes(self, unloading: int, timeout: float = 0.0) -> int | None:
        """The bytes that an unloading gave back; None while requests hold it. Steps make progress, waiting does not."""
        return self._required().freed(unloading, timeout)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter in memory, or no longer. Raises AdapterError."""
        self._required().pin(name, pinned)

    def loaded(self) -> list[tuple[AdapterInfo, LoadReport]]:
        """All that are loaded."""
        return self._required().loaded()

    def _required(self) -> AdapterRegistry:
        if self.registry is None:
            raise AdapterError("no adapters are served: enable_lora is not set.")
        return self.registry

    def _folder(self, path: str) -> Path:
        return resolve_adapter(path, self._config.lora, self._config.model)

    # -- for requests ---------------------------------------------------------------------------------------------

    def hold(self, serial: int, request_id: str, lora_request: LoRARequest) -> AdapterUse:
        """Load what a request names, and hold the versions that it runs with until `release`. Raises RequestError."""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"request {request_id}: lora_request must be a LoRARequest, not {lora_request!r}")
        if self.registry is None:
            raise RequestError(f"request {request_id}: lora_request was given, and enable_lora is not set")
        try:
            self.load_for(lora_request)
            with self._lock:
                self._held[serial] = self.registry.acquire(lora_request)
                return self._held[serial]
        except UnknownAdapterError as error:
            raise UnknownAdapterError(f"request {request_id}: {error}", error.name) from error
        except QuireError as error:
            raise RequestError(f"request {request_id}: {error}") from error

    def release(self, serial: int) -> None:
        """A request has ended, or will not begin; twice is once."""
        if self.registry is not None:
            with self._lock:
                self.registry.release(self._held.pop(serial, ()))

    @property
    def holders(self) -> Collection[int]:
        """The serial numbers of requests that hold adapters."""
        with self._lock:
            return list(self._held)

    # -- for the engine -------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether weights are being read."""
        return self.registry is not None and bool(self.registry.reading)

    def taken_off(self, plan: StepPlan) -> None:
        """The device no longer has the adapters that a plan drops."""
        if self.registry is not None and plan.drop:
            self.registry.unclaim(uid for uid in plan.drop if uid not in plan.install)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the registry counts as many holds as there are."""
        if self.registry is not None:
            with self._lock:
                self.registry.check_integrity(list(self._held.values()))

    @property
    def lingers(self) -> bool:
        """Whether the process would wait at its end for what a worker imports."""
        return self.registry is not None and self.registry.imports.running()

    def close(self) -> None:
        """Stop the workers."""
        if self.registry is not None:
            self.registry.close()
