"""All adapters that are known by name, and the weights of those that are in main memory.

A name stands for its newest version; requests hold the version with which they began, until they end. The weights of a
version that nobody needs now may go, the least recently used first, and are read from its files again when they are
needed. Any thread may call anything here; files are read by workers, outside the lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Literal

from quire.config import LoRAConfig
from quire.errors import AdapterError, RequestError, UnknownAdapterError
from quire.lora.adapter import LoadedAdapter, Reader
from quire.lora.memory import (
    AdapterInfo,
    AdapterVersion,
    HostMemory,
    LoadReport,
    StagedAdapter,
    allowed_folder,
    check_versions,
)
from quire.lora.priority import lower_priority
from quire.lora.request import LoRARequest, name_fault
from quire.types import AdapterRef, AdapterUse

_MOST_FREED = 1000  # unloadings that are remembered until somebody asks


class AdapterRegistry:
    """Names, versions and weights.

    It has more public methods than other classes here: who loads, who asks and the step loop share one lock and one
    table of versions, and a method is what one of them does under the lock.

    Raises AdapterError for adapters that are not to be had, RequestError for requests that name them wrongly.
    """

    def __init__(self, config: LoRAConfig, reader: Reader, notify: Callable[[], object] = lambda: None) -> None:
        self._config = config
        self._reader = reader
        self._notify = notify  # called when weights have come that a step may wait for
        self._changed = threading.Condition()
        self._names: dict[str, AdapterVersion] = {}
        self._loading = 0
        self._versions: dict[int, AdapterVersion] = {}  # by uid; retired ones too, until nobody holds them
        self._memory = HostMemory(config, self._versions)
        self._workers = ThreadPoolExecutor(config.workers, "quire-adapters", lower_priority)
        self._mixtures: Counter[frozenset[int]] = Counter()  # that requests hold, by uids
        self._uids = count(1)
        self._stamps = count()
        self.imports = self._workers.submit(import_module, "peft")  # takes seconds: not in the first request
        self._freed: dict[int, int] = {}  # uid -> bytes, of versions whose unloading somebody waits for

    def close(self) -> None:
        """Stop the workers once they are done with what they are at."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    # -- names ----------------------------------------------------------------------------------------------------

    def load(
        self,
        name: str,
        path: Path,
        replace: bool = False,
        pinned: bool = False,
        int_id: int | None = None,
        source: str | None = None,
    ) -> LoadReport:
        """Read an adapter and let `name` stand for it from now on: `stage` and `publish`."""
        return self.publish(self.stage(name, path, replace, pinned, int_id, source))

    def stage(
        self,
        name: str,
        path: Path,
        replace: bool = False,
        pinned: bool = False,
        int_id: int | None = None,
        source: str | None = None,
    ) -> StagedAdapter:
        """Read an adapter that `name` may come to stand for; whoever does not want it drops it.

        replace: for a name that is taken; requests that run go on with the version that they have, and a pin stays.
        source: what the caller calls the path, where that is something else (a hub id).
        """
        if fault := name_fault(name):
            raise AdapterError(f"adapter name {name!r:.200}: {fault}.")
        self._check_free(name, int_id, replace)
        begin = time.monotonic()
        path = allowed_folder(path, self._config.roots)
        adapter = self._read_new(path)
        seconds = time.monotonic() - begin
        report = LoadReport(name, adapter.modules, adapter.ranks, adapter.nbytes, seconds, **vars(adapter.bound))
        with self._changed:
            ref = AdapterRef(name, next(self._uids), adapter.digest, adapter.visual)
            version = AdapterVersion(ref, path, source, report, int_id, adapter.mixable, pinned=pinned)
            self._check_room(version)
        return StagedAdapter(version, adapter, replace)

    def publish(self, staged: StagedAdapter, gone: Callable[[], object] | None = None) -> LoadReport:
        """Let a name stand for what was staged. It fails where the name, its number or its room went meanwhile.

        gone: called under the lock, once nobody has the version, neither its name nor a request.
        """
        version, name = staged.version, staged.version.ref.name
        with self._changed:
            self._check_free(name, version.int_id, staged.replace)
            old = self._check_room(version)
            version.stamp, version.gone = next(self._stamps), gone
            if old is not None:
                version.pinned = version.pinned or old.pinned
                version.int_id = version.int_id if version.int_id is not None else old.int_id
                self._retire(old)
            self._names[name] = self._versions[version.ref.uid] = version
            if self._memory.make_room(version, urgent=False):
                version.adapter = staged.adapter
            self._changed.notify_all()
        return version.report

    def unload(self, name: str) -> int:
        """Forget a name; its weights go when no request holds them. Returns the version's uid, for `freed`."""
        with self._changed:
            version = self._named(name)
            del self._names[name]
            if len(self._freed) >= _MOST_FREED:  # nobody asked about these
                self._freed = {uid: size for uid, size in self._freed.items() if size < 0}
            self._freed[version.ref.uid] = -1
            self._retire(version)
            return version.ref.uid

    def freed(self, uid: int, timeout: float) -> int | None:
        """The bytes that an unloading gave back; None if requests still hold it after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._freed.get(uid, 0) >= 0, timeout)
            return None if self._freed.get(uid, 0) < 0 else self._freed.pop(uid, 0)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter in memory, or no longer."""
        with self._changed:
            version = self._named(name)
            if pinned and not version.pinned:
                self._memory.check(version, pinned, None, self._mixed())
            version.pinned = pinned

    def knows(self, name: str) -> bool:
        with self._changed:
            return name in self._names

    def loaded(self) -> list[tuple[AdapterInfo, LoadReport]]:
        """All that have names, in the order of loading."""
        with self._changed:
            versions = sorted(self._names.values(), key=lambda version: version.ref.uid)
            return [(version.info(), version.report) for version in versions]

    def ensure(self, request: LoRARequest, resolve: Callable[[str], Path]) -> None:
        """Load what a request names by its path (`resolve` says where that leads), unless it is loaded."""
        with self._changed:
            version = self._names.get(request.lora_name)
        if request.adapters is not None:
            return
        if version is not None:
            self._check_path(request, version)
            return
        if request.lora_path is None:
            name = request.lora_name
            message = f"no adapter {name!r} is loaded{self._loaded()}: load it, or give lora_path"
            raise UnknownAdapterError(message, name)
        try:
            path = resolve(request.lora_path)
            self.load(request.lora_name, path, int_id=request.lora_int_id, source=request.lora_path)
        except AdapterError:
            with self._changed:
                if request.lora_name not in self._names:  # else another thread was faster
                    raise

    # -- requests -------------------------------------------------------------------------------------------------

    def acquire(self, request: LoRARequest) -> AdapterUse:
        """The versions that a new request runs with, held until `release`."""
        with self._changed:
            wanted = request.adapters if request.adapters is not None else [(request.lora_name, 1.0)]
            versions = [self._named(name) for name, _ in wanted]
            if request.adapters is None:
                self._check_same(request, versions[0])
            else:
                self._memory.check_mixture(versions, [one for one in self._names.values() if one.pinned])
            for version in versions:
                version.users += 1
                version.stamp = next(self._stamps)
                version.error = None  # of an older request's
            if len(versions) > 1:
                self._mixtures[frozenset(version.ref.uid for version in versions)] += 1
            return tuple((version.ref, weight) for version, (_, weight) in zip(versions, wanted, strict=True))

    def release(self, use: AdapterUse) -> None:
        with self._changed:
            versions = [self._versions[ref.uid] for ref, _ in use]
            if len(versions) > 1:
                self._mixtures[frozenset(version.ref.uid for version in versions)] -= 1
                self._mixtures = +self._mixtures
            for version in versions:
                version.users -= 1
                self._forget_if_done(version)

    # -- weights: for the step loop ---------------------------------------------------------------------------------

    def fetch(self, uid: int, urgent: bool) -> Literal["ready", "coming", "no room", "failed"]:
        """Have a version's weights brought to main memory. urgent: others that wait for theirs may lose them."""
        with self._changed:
            version = self._versions[uid]
            if version.adapter is not None:
                return "ready"
            if version.error is not None:
                return "failed"
            if not version.fetching:
                if not self._memory.make_room(version, urgent):
                    return "no room"
                self._workers.submit(self._read_again, version)
                version.fetching = True
            return "coming"

    def claim(self, uid: int) -> bool:
        """Keep a version's weights in memory from now on, for the device; False: they are not there."""
        with self._changed:
            version = self._versions[uid]
            if version.adapter is None:
                return False
            version.resident, version.stamp = True, next(self._stamps)
            return True

    def unclaim(self, uids: Iterable[int]) -> None:
        """The device has let go of these."""
        with self._changed:
            for uid in uids:
                version = self._versions.get(uid)
                if version is not None:
                    version.resident = False
                    self._forget_if_done(version)

    def weights(self, uid: int) -> LoadedAdapter:
        """Of a version that is claimed."""
        with self._changed:
            adapter = self._versions[uid].adapter
            assert adapter is not None
            return adapter

    def has(self, uid: int) -> bool:
        return uid in self._versions

    def size(self, uid: int) -> int:
        return self._versions[uid].size

    def is_pinned(self, uid: int) -> bool:
        return self._versions[uid].pinned

    def error(self, uid: int) -> str | None:
        """Why a version's weights cannot be had; asked once, and tried again by the next request."""
        with self._changed:
            version = self._versions[uid]
            error, version.error = version.error, None
            return error

    def drained(self) -> list[int]:
        """Residents that have no name and no request any more."""
        with self._changed:
            return [v.ref.uid for v in self._versions.values() if v.retired and v.resident and not v.users]

    @property
    def reading(self) -> bool:
        """Whether weights are on their way that steps wait for; the engine is notified when they are there."""
        with self._changed:
            return any(version.fetching for version in self._versions.values())

    @property
    def num_reading(self) -> int:
        """Adapters whose files are being read, for steps or to be loaded."""
        with self._changed:
            return self._loading + sum(version.fetching for version in self._versions.values())

    @property
    def host_bytes(self) -> int:
        """Taken in main memory."""
        with self._changed:
            return self._memory.bytes

    def check_integrity(self, holders: Iterable[AdapterUse]) -> None:
        """Raise AssertionError unless versions, names, budget and what all requests hold agree."""
        with self._changed:
            check_versions(self._versions, self._names, holders)
            if self._memory.bytes > self._config.host_bytes:
                raise AssertionError("adapters: more than the budget")

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _named(self, name: str) -> AdapterVersion:
        version = self._names.get(name)
        if version is None:
            raise UnknownAdapterError(f"no adapter {name!r} is loaded{self._loaded()}.", name)
        return version

    def _loaded(self) -> str:
        names = list(self._names)
        return f" (loaded: {', '.join(names[:10])}{', ...' * (len(names) > 10)})" if names else ""

    def _check_free(self, name: str, int_id: int | None, replace: bool) -> None:
        with self._changed:
            if name in self._names and not replace:
                raise AdapterError(
                    f"adapter {name!r} is loaded already, from {self._names[name].path}: unload it, or load_inplace."
                )
            self._check_number(name, int_id)

    def _check_room(self, version: AdapterVersion) -> AdapterVersion | None:
        """Whether there is room for it. The version in whose place it comes."""
        old = self._names.get(version.ref.name)
        self._memory.check(version, version.pinned or (old is not None and old.pinned), old, self._mixed())
        return old

    def _check_number(self, name: str, int_id: int | None) -> None:
        for other in self._names.values():
            if int_id is not None and other.int_id == int_id and other.ref.name != name:
                raise AdapterError(f"lora_int_id={int_id} is adapter {other.ref.name!r}'s: take another for {name!r}.")

    def _check_path(self, request: LoRARequest, version: AdapterVersion) -> None:
        """Not under the lock: it looks at the disk."""
        if request.lora_path is not None and request.lora_path not in (version.source, str(version.path)):
            try:
                same = allowed_folder(Path(request.lora_path), self._config.roots) == version.path
            except AdapterError:
                same = False
            if not same:
                raise RequestError(
                    f"adapter {request.lora_name!r} is loaded from {version.path}, and the request names "
                    f"{request.lora_path}: unload it, or load the other with load_inplace"
                )

    def _check_same(self, request: LoRARequest, version: AdapterVersion) -> None:
        if request.lora_int_id is not None:
            if version.int_id is None:
                self._check_number(request.lora_name, request.lora_int_id)
                version.int_id = request.lora_int_id
            if version.int_id != request.lora_int_id:
                raise RequestError(
                    f"adapter {request.lora_name!r} has lora_int_id={version.int_id}, not {request.lora_int_id}"
                )

    def _mixed(self) -> list[list[AdapterVersion]]:
        """The mixtures that requests hold."""
        return [[self._versions[uid] for uid in uids] for uids in self._mixtures]

    def _retire(self, version: AdapterVersion) -> None:
        version.retired, version.pinned = True, False
        self._forget_if_done(version)

    def _forget_if_done(self, version: AdapterVersion) -> None:
        if version.retired and not version.users and not version.resident:
            self._versions.pop(version.ref.uid, None)
            if version.ref.uid in self._freed:
                self._freed[version.ref.uid] = version.size if version.adapter is not None else 0
            version.adapter = None
            if version.gone is not None:
                version.gone()
            self._changed.notify_all()

    def _read_new(self, path: Path) -> LoadedAdapter:
        with self._changed:
            self._loading += 1
        try:
            return self._workers.submit(self._reader.read, path).result()
        finally:
            with self._changed:
                self._loading -= 1

    # -- workers --------------------------------------------------------------------------------------------------

    def _read_again(self, version: AdapterVersion) -> None:
        adapter, error = None, None
        try:
            adapter = self._reader.read(allowed_folder(version.path, self._config.roots))
            if adapter.digest != version.ref.digest:
                adapter, error = None, f"{version.path}: has changed since it was loaded: load it again."
        except AdapterError as reason:
            error = str(reason)
        except BaseException as reason:  # requests must not wait for ever
            error = f"{version.path}: cannot be read: {type(reason).__name__}"
        with self._changed:
            version.fetching = False
            version.adapter, version.error = adapter, error
            self._changed.notify_all()
        self._notify()
