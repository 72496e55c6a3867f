"""All adapters that are known by name, and the weights of those that are in main memory.

A name stands for its newest version; requests hold the version with which they began, until they end. The weights of a
version that nobody needs now may go, the least recently used first, and are read from its files again when they are
needed. Any thread may call anything here; files are read outside the lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Literal

from quire.config import LoRAConfig
from quire.contracts import AdapterRef, AdapterUse
from quire.errors import AdapterError, RequestError
from quire.lora.adapter import Adapter, AdapterReader
from quire.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded. modules: layers that it changes; ranks: of their LoRA; bytes: in memory."""

    name: str
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter. tier: "device" (steps can use it), "host" (in main memory) or "disk" (read when needed).

    requests: unfinished ones that hold this version.
    """

    name: str
    lora_int_id: int | None
    path: str
    modules: int
    ranks: tuple[int, ...]
    bytes: int
    tier: Literal["device", "host", "disk"]
    pinned: bool
    requests: int


@dataclass(eq=False)
class _Version:
    """source: what its path was called. users: requests that hold it. resident: on the device, so that its weights must
    stay. fetching: being read."""

    ref: AdapterRef
    path: Path
    source: str | None
    report: LoadReport
    int_id: int | None
    mixable: bool
    recordable: bool
    adapter: Adapter | None = None
    users: int = 0
    resident: bool = False
    fetching: bool = False
    retired: bool = False
    pinned: bool = False
    stamp: int = 0
    error: str | None = None

    @property
    def size(self) -> int:
        return self.report.bytes


def _uids(versions: Iterable[_Version]) -> frozenset[int]:
    return frozenset(version.ref.uid for version in versions)


class AdapterLibrary:
    """Names, versions and weights.

    Raises AdapterError for adapters that are not to be had, RequestError for requests that name them wrongly.
    """

    def __init__(self, config: LoRAConfig, reader: AdapterReader) -> None:
        self._config = config
        self._reader = reader
        self._changed = threading.Condition()
        self._names: dict[str, _Version] = {}
        self._versions: dict[int, _Version] = {}  # by uid; retired ones too, until nobody holds them
        self._reading = threading.Semaphore(config.workers)
        self._workers = ThreadPoolExecutor(config.workers, thread_name_prefix="quire-adapters")
        self._mixtures: Counter[frozenset[int]] = Counter()  # that requests hold, by uids
        self._uids = count(1)
        self._stamps = count()
        self._workers.submit(import_module, "peft")  # takes seconds: not in the first request
        self._freed: dict[int, int] = {}  # uid -> bytes, of versions whose unloading somebody waits for

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
        """Read an adapter and let `name` stand for it from now on.

        replace: for a name that is taken; requests that run go on with the version that they have, and a pin stays.
        source: what the caller calls the path, where that is something else (a hub id).
        """
        if not isinstance(name, str) or not name:
            raise AdapterError(f"adapter name {name!r}: must be a non-empty string.")
        self._check_free(name, int_id, replace)
        begin = time.monotonic()
        path = self._allowed(path)
        with self._reading:
            adapter = self._reader.read(path)
        report = LoadReport(
            name,
            len(adapter.changes) + len(adapter.parameters),
            adapter.ranks,
            adapter.nbytes,
            time.monotonic() - begin,
        )
        with self._changed:
            self._check_free(name, int_id, replace)
            ref = AdapterRef(name, next(self._uids), adapter.digest, adapter.visual)
            version = _Version(ref, path, source, report, int_id, adapter.mixable, adapter.recordable)
            old = self._names.get(name)
            pinned = pinned or (old is not None and old.pinned)
            self._check_budget(version, pinned, old)
            version.pinned, version.stamp = pinned, next(self._stamps)
            if old is not None:
                version.int_id = int_id if int_id is not None else old.int_id
                self._retire(old)
            self._names[name] = self._versions[ref.uid] = version
            if self._make_room(version, urgent=False):
                version.adapter = adapter
            self._changed.notify_all()
        return report

    def unload(self, name: str) -> int:
        """Forget a name; its weights go when no request holds them. Returns the version's uid, for `freed`."""
        with self._changed:
            version = self._named(name)
            del self._names[name]
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
                self._check_budget(version, pinned)
            version.pinned = pinned

    def loaded(self) -> list[AdapterInfo]:
        """All that have names, in the order of loading."""
        with self._changed:
            return [
                AdapterInfo(
                    version.ref.name, version.int_id, str(version.path), version.report.modules, version.report.ranks,
                    version.size, "device" if version.resident else "host" if version.adapter else "disk",
                    version.pinned, version.users,
                )
                for version in sorted(self._names.values(), key=lambda version: version.ref.uid)
            ]  # fmt: skip

    def ensure(self, request: LoRARequest, resolve: Callable[[str], Path]) -> None:
        """Load what a request names by its path (`resolve` says where that leads), unless it is loaded."""
        with self._changed:
            version = self._names.get(request.lora_name)
            known = version is not None or request.adapters is not None
        if known:
            return
        if request.lora_path is None:
            raise RequestError(
                f"no adapter {request.lora_name!r} is loaded{self._loaded()}: load it, or give lora_path"
            )
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
            versions = [self._wanted(name) for name, _ in wanted]
            if request.adapters is None:
                self._check_same(request, versions[0])
            else:
                self._check_mixture(versions)
            for version in versions:
                version.users += 1
                version.stamp = next(self._stamps)
                version.error = None  # of an older request's
            if len(versions) > 1:
                self._mixtures[_uids(versions)] += 1
            return tuple((version.ref, weight) for version, (_, weight) in zip(versions, wanted, strict=True))

    def release(self, use: AdapterUse) -> None:
        with self._changed:
            versions = [self._versions[ref.uid] for ref, _ in use]
            if len(versions) > 1:
                self._mixtures[_uids(versions)] -= 1
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
                if not self._make_room(version, urgent):
                    return "no room"
                version.fetching = True
                self._workers.submit(self._read_again, version)
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

    def weights(self, uid: int) -> Adapter:
        """Of a version that is claimed."""
        with self._changed:
            adapter = self._versions[uid].adapter
            assert adapter is not None
            return adapter

    def size(self, uid: int) -> int:
        return self._versions[uid].size

    def is_pinned(self, uid: int) -> bool:
        return self._versions[uid].pinned

    def is_recordable(self, uid: int) -> bool:
        return self._versions[uid].recordable

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

    def wait(self, timeout: float) -> None:
        """Until some weights have come, if any are on their way."""
        with self._changed:
            if any(version.fetching for version in self._versions.values()):
                self._changed.wait(timeout)

    @property
    def host_bytes(self) -> int:
        """Taken in main memory."""
        with self._changed:
            return sum(v.size for v in self._versions.values() if v.adapter is not None or v.fetching)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self, holders: Iterable[AdapterUse]) -> None:
        """Raise AssertionError unless versions, names, budget and what all requests hold agree."""
        held: dict[int, int] = {}
        for use in holders:
            for ref, _ in use:
                held[ref.uid] = held.get(ref.uid, 0) + 1
        with self._changed:
            for uid, version in self._versions.items():
                if version.users != held.get(uid, 0):
                    raise AssertionError(f"adapter {version.ref}: {version.users} users, {held.get(uid, 0)} holders")
                if version.retired == (self._names.get(version.ref.name) is version):
                    raise AssertionError(f"adapter {version.ref}: retired, or nameless")
                if version.retired and not version.users and not version.resident:
                    raise AssertionError(f"adapter {version.ref}: nobody holds it, and it is still here")
                if version.resident and version.adapter is None:
                    raise AssertionError(f"adapter {version.ref}: resident without weights")
            if set(held) - set(self._versions):
                raise AssertionError("a request holds an adapter that is gone")
            taken = sum(v.size for v in self._versions.values() if v.adapter is not None or v.fetching)
            if taken > self._config.host_bytes:
                raise AssertionError("adapters: more than the budget")

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _named(self, name: str) -> _Version:
        version = self._names.get(name)
        if version is None:
            raise AdapterError(f"no adapter {name!r} is loaded{self._loaded()}.")
        return version

    def _wanted(self, name: str) -> _Version:
        version = self._names.get(name)
        if version is None:
            raise RequestError(f"no adapter {name!r} is loaded{self._loaded()}")
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

    def _check_number(self, name: str, int_id: int | None) -> None:
        for other in self._names.values():
            if int_id is not None and other.int_id == int_id and other.ref.name != name:
                raise AdapterError(f"lora_int_id={int_id} is adapter {other.ref.name!r}'s: take another for {name!r}.")

    def _check_same(self, request: LoRARequest, version: _Version) -> None:
        if request.lora_path is not None and request.lora_path not in (version.source, str(version.path)):
            try:
                same = self._allowed(Path(request.lora_path)) == version.path
            except AdapterError:
                same = False
            if not same:
                raise RequestError(
                    f"adapter {request.lora_name!r} is loaded from {version.path}, and the request names "
                    f"{request.lora_path}: unload it, or load the other with load_inplace"
                )
        if request.lora_int_id is not None:
            if version.int_id is None:
                self._check_number(request.lora_name, request.lora_int_id)
                version.int_id = request.lora_int_id
            if version.int_id != request.lora_int_id:
                raise RequestError(
                    f"adapter {request.lora_name!r} has lora_int_id={version.int_id}, not {request.lora_int_id}"
                )

    def _check_mixture(self, versions: list[_Version]) -> None:
        for version in versions:
            if not version.mixable:
                raise RequestError(
                    f"adapter {version.ref.name!r} is more than plain LoRA (DoRA, biases, saved modules or trained "
                    "tokens) and cannot be part of a mixture"
                )
        kept = [version for version in self._names.values() if version.pinned]
        if not self._fit({*versions, *kept}) or len(versions) > (self._config.max_loras or len(versions)):
            raise RequestError(
                f"the mixture takes {sum(version.size for version in versions):,} bytes and {len(versions)} adapters, "
                f"and finds no room ({self._limits()}; {len(kept)} adapters are pinned)"
            )

    def _allowed(self, path: Path) -> Path:
        """The folder with links resolved; AdapterError where it is none, or outside the allowed ones."""
        try:
            resolved = Path(path).expanduser().resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise AdapterError(f"{path}: there is no such folder ({type(error).__name__}).") from None
        if not resolved.is_dir():
            raise AdapterError(f"{path}: is no folder; give the one that holds adapter_config.json.")
        if self._config.roots is not None:
            bases = [Path(root).expanduser().resolve() for root in self._config.roots]
            try:
                found = [resolved, *(file.resolve() for file in resolved.glob("adapter_*"))]
            except (OSError, RuntimeError) as error:
                raise AdapterError(f"{path}: its links lead nowhere: {error}") from None
            if not all(any(one.is_relative_to(base) for base in bases) for one in found):
                raise AdapterError(f"{path}: lies outside the folders that adapters may be read from.")
        return resolved

    def _check_budget(self, version: _Version, pinned: bool, old: _Version | None = None) -> None:
        """Every adapter, and every mixture that is in use, must find room beside those that are pinned.

        old: the version in whose place this one comes.
        """
        kept = {v for v in self._names.values() if v.pinned and v is not old}
        together = [{version}]
        if pinned:
            together += [{v, version} for v in self._versions.values() if v is not old or v.users]
            together += [{version, *(self._versions[uid] for uid in uids)} for uids in self._mixtures]
        if not all(self._fit(kept | group) for group in together):
            raise AdapterError(
                f"adapter {version.ref.name!r} takes {version.size:,} bytes beside {sum(v.size for v in kept):,} of "
                f"pinned ones, and that leaves no room for all others: {self._limits()}. Raise these, or pin less."
            )

    def _fit(self, versions: Collection[_Version]) -> bool:
        """Whether memory can hold all of these at once."""
        most = min(self._config.host_bytes, self._config.device_bytes)
        return sum(v.size for v in versions) <= most and len(versions) <= (self._config.max_cpu_loras or len(versions))

    def _limits(self) -> str:
        config = self._config
        limits = {"lora_device_bytes": config.device_bytes, "lora_host_bytes": config.host_bytes,
                  "max_loras": config.max_loras, "max_cpu_loras": config.max_cpu_loras}  # fmt: skip
        return ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)

    def _make_room(self, version: _Version, urgent: bool) -> bool:
        """Drop weights that nobody needs until one more version fits."""
        there = [v for v in self._versions.values() if v.adapter is not None or v.fetching]
        free = self._config.host_bytes - sum(v.size for v in there)
        slots = (self._config.max_cpu_loras or len(there) + 1) - len(there)
        victims = [v for v in there if not (v.resident or v.pinned or v.fetching) and (urgent or not v.users)]
        victims.sort(key=lambda v: (v.users > 0, v.stamp))
        chosen = []
        for victim in victims:
            if free >= version.size and slots >= 1:
                break
            chosen.append(victim)
            free, slots = free + victim.size, slots + 1
        if free < version.size or slots < 1:
            return False
        for victim in chosen:
            victim.adapter = None
        return True

    def _retire(self, version: _Version) -> None:
        version.retired, version.pinned = True, False
        self._forget_if_done(version)

    def _forget_if_done(self, version: _Version) -> None:
        if version.retired and not version.users and not version.resident:
            self._versions.pop(version.ref.uid, None)
            if version.ref.uid in self._freed:
                self._freed[version.ref.uid] = version.size if version.adapter is not None else 0
            version.adapter = None
            self._changed.notify_all()

    # -- workers --------------------------------------------------------------------------------------------------

    def _read_again(self, version: _Version) -> None:
        adapter, error = None, None
        try:
            adapter = self._reader.read(self._allowed(version.path))
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
