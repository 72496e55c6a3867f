"""Which adapters steps can use: bytes, references and the order of eviction. The tensors are the slots'."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quire.config import LoRAConfig
from quire.lora.registry import AdapterRegistry
from quire.types import AdapterRef, AdapterUse


@dataclass(slots=True)
class _Entry:
    ref: AdapterRef
    size: int
    references: int = 0


class DeviceAdapterBudget:
    """The adapters on the device, within a budget of bytes and, if one is set, of number.

    An adapter is *held* by running sequences or *kept*: evicted when room is needed, the least recently used first,
    pinned ones last. All methods are the step loop's. What changes is told to the runner by `take_changes`.
    """

    def __init__(self, config: LoRAConfig, registry: AdapterRegistry) -> None:
        self.capacity = min(config.device_bytes, config.host_bytes)
        self.bytes = 0
        self.hits = Counter({"device": 0, "host": 0, "disk": 0})  # by the tier where an adapter was when it was wanted
        self._most = config.max_loras
        self._registry = registry
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # the least recently used first
        self._installed: list[int] = []
        self._dropped: list[int] = []
        self._read: set[int] = set()  # that somebody waits for, or waited, while they come from the disk

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, uid: int) -> bool:
        return uid in self._entries

    def hold(self, use: AdapterUse, urgent: bool = True) -> bool:
        """Add a reference to each adapter, bringing in those that are missing; False: not in this step.

        urgent: what is missing may take the memory of adapters that other requests wait for.
        """
        missing = [ref for ref, _ in use if ref.uid not in self._entries]
        if missing and not self._bring(missing, {ref.uid for ref, _ in use}, urgent):
            return False
        self.hits["device"] += len(use) - len(missing)
        for ref in missing:
            self.hits["disk" if ref.uid in self._read else "host"] += 1
            self._read.discard(ref.uid)
        for ref, _ in use:
            self._entries[ref.uid].references += 1
            self._entries.move_to_end(ref.uid)
        return True

    def prefetch(self, use: AdapterUse) -> None:
        """Have what a waiting sequence will need read into main memory, where there is room."""
        for ref, _ in use:
            if ref.uid not in self._entries:
                self._fetch(ref.uid, urgent=False)

    def release(self, use: AdapterUse) -> None:
        for ref, _ in use:
            entry = self._entries[ref.uid]
            if entry.references <= 0:
                raise AssertionError("adapter released more often than held")
            entry.references -= 1

    def failure(self, use: AdapterUse) -> str | None:
        """Why one of the adapters cannot be had."""
        for ref, _ in use:
            error = None if ref.uid in self._entries else self._registry.error(ref.uid)
            if error is not None:
                return f"adapter {ref.name!r}: {error}"
        return None

    def settle(self) -> None:
        """Let go of adapters that were unloaded or replaced and that nobody holds any more."""
        self._read = {uid for uid in self._read if self._registry.has(uid)}
        for uid in self._registry.drained():
            if uid in self._entries:
                self._drop(uid)

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(installed, dropped) since the last call, by uid; drop first."""
        changes = tuple(self._installed), tuple(self._dropped)
        self._installed, self._dropped = [], []
        return changes

    def _bring(self, missing: list[AdapterRef], wanted: set[int], urgent: bool) -> bool:
        sizes = {ref.uid: self._registry.size(ref.uid) for ref in missing}
        victims = self._victims(sum(sizes.values()), len(missing), wanted)
        states = [self._fetch(ref.uid, urgent) for ref in missing]
        if "no room" in states and urgent:
            self._yield_memory(sum(sizes.values()), wanted)
        if victims is None or any(state != "ready" for state in states):
            return False
        claimed: list[AdapterRef] = []
        for ref in missing:
            if not self._registry.claim(ref.uid):  # evicted between two calls
                self._registry.unclaim(one.uid for one in claimed)
                return False
            claimed.append(ref)
        for uid in victims:
            self._drop(uid)
        for ref in missing:
            self._entries[ref.uid] = _Entry(ref, sizes[ref.uid])
            self.bytes += sizes[ref.uid]
            self._installed.append(ref.uid)
        return True

    def _fetch(self, uid: int, urgent: bool) -> str:
        state = self._registry.fetch(uid, urgent)
        if state == "coming":
            self._read.add(uid)
        elif state == "failed":
            self._read.discard(uid)
        return state

    def _victims(self, size: int, count: int, wanted: set[int]) -> list[int] | None:
        """What to evict for `count` more adapters of `size` bytes together; None: there is no room."""
        free = self.capacity - self.bytes
        slots = (self._most or len(self._entries) + count) - len(self._entries)
        chosen: list[int] = []
        for uid in self._kept(wanted):
            if free >= size and slots >= count:
                break
            chosen.append(uid)
            free, slots = free + self._entries[uid].size, slots + 1
        return chosen if free >= size and slots >= count else None

    def _kept(self, wanted: set[int]) -> Iterator[int]:
        """Those that may go, the first to go first; who takes one and drops it must have taken all.

        A few are wanted of hundreds, in each step in which somebody waits: so the rest is not looked at.
        """
        pinned: list[int] = []
        for uid, entry in self._entries.items():
            if entry.references or uid in wanted:
                continue
            if self._registry.is_pinned(uid):
                pinned.append(uid)
            else:
                yield uid
        yield from pinned

    def _yield_memory(self, size: int, wanted: set[int]) -> None:
        """Main memory is full of what lies on the device too: let go of some of that, for the next try."""
        for uid in list(self._kept(wanted)):
            if size <= 0:
                break
            if not self._registry.is_pinned(uid):
                size -= self._entries[uid].size
                self._drop(uid)

    def _drop(self, uid: int) -> None:
        self.bytes -= self._entries.pop(uid).size
        if uid in self._installed:  # and not yet told
            self._installed.remove(uid)
            self._registry.unclaim([uid])
        else:
            self._dropped.append(uid)

    def check_integrity(self, holders: Iterable[AdapterUse]) -> None:
        """Raise AssertionError unless the entries agree with each other and with what all holders hold."""
        held = Counter(ref.uid for use in holders for ref, _ in use)
        for uid, entry in self._entries.items():
            if entry.references != held[uid]:
                raise AssertionError(f"adapter {entry.ref}: {entry.references} references, {held[uid]} holders")
        if set(held) - set(self._entries):
            raise AssertionError("a running sequence's adapter is not on the device")
        if self.bytes != sum(entry.size for entry in self._entries.values()) or self.bytes > self.capacity:
            raise AssertionError("adapters: the bytes do not add up, or are more than the budget")
