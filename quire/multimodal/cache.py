"""Whose features are in memory: bytes, references and the order of eviction. The tensors are the runner's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    size: int
    references: int = 0


class FeatureCache:
    """The features of encoded images, by digest, within `capacity` bytes.

    An entry is *held* (references > 0) or *kept*: evicted when room is needed, the least recently used first.
    `evicted` collects what the runner must let go of, until `take_evicted`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._evicted: list[bytes] = []

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, digest: bytes) -> bool:
        """Add a reference, if the features are there."""
        entry = self._entries.get(digest)
        if entry is None:
            return False
        self.hits += 1
        entry.references += 1
        self._entries.move_to_end(digest)
        return True

    def insert(self, digest: bytes, size: int) -> bool:
        """Add an entry with one reference, evicting what nobody holds; False when there is no room even so."""
        free = self.capacity - self.bytes
        kept = sum(entry.size for entry in self._entries.values() if not entry.references) if size > free else 0
        if size > free + kept:
            return False
        for other in list(self._entries):
            if self.bytes + size <= self.capacity:
                break
            if not self._entries[other].references:
                self.discard(other)
        self.misses += 1
        self._entries[digest] = _Entry(size, 1)
        self.bytes += size
        # Evicted and encoded anew in one step: there is nothing to let go of.
        self._evicted = [one for one in self._evicted if one != digest]
        return True

    def release(self, digest: bytes) -> None:
        """Take a reference; of an entry that was discarded meanwhile, there is none."""
        entry = self._entries.get(digest)
        if entry is not None:
            if entry.references <= 0:
                raise AssertionError("features released more often than held")
            entry.references -= 1

    def discard(self, digest: bytes) -> None:
        """Forget an entry, whoever holds it: it was evicted, or encoding it has failed."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.bytes -= entry.size
            self._evicted.append(digest)

    def clear(self) -> None:
        """Forget all that nobody holds."""
        for digest in [digest for digest, entry in self._entries.items() if not entry.references]:
            self.discard(digest)

    def take_evicted(self) -> tuple[bytes, ...]:
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def check_integrity(self, holders: Iterable[Iterable[bytes]]) -> None:
        """Raise AssertionError unless the entries agree with each other and with what all holders hold."""
        held = Counter(digest for digests in holders for digest in digests)
        for digest, entry in self._entries.items():
            if entry.references != held[digest]:
                raise AssertionError(f"features: {entry.references} references, {held[digest]} holders")
        if self.bytes != sum(entry.size for entry in self._entries.values()):
            raise AssertionError("features: the bytes do not add up")
        if self.bytes > self.capacity:
            raise AssertionError("features: more than the budget")
