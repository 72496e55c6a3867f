"""What `linear` reads of adapters: for each weight a table of their shares, and for each call who owns which rows.

Both lie in memory at fixed addresses and are changed in place, so that a recorded step serves any mixture of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from quire.kernels.packed import num_rows
from quire.kernels.transfer import overwrite, send

# The rows of csrc/arguments.h's LoraEntry and LoraSegment.
_ENTRY = np.dtype([("a", "<u8"), ("b", "<u8"), ("scale", "<u8"), ("shift", "<u8"), ("rank", "<i8"), ("scaling", "<f8")])
_SEGMENT = np.dtype([("start", "<i8"), ("end", "<i8"), ("slot", "<i8"), ("weight", "<f8")])
ENTRY_BYTES, SEGMENT_BYTES = _ENTRY.itemsize, _SEGMENT.itemsize
PACKED_COLUMNS = 32  # kLoraColumns
_CPU = torch.device("cpu")

# start, end, slot, weight: rows start .. end are those of the adapter in `slot`, whose share counts `weight` times.
Segment = tuple[int, int, int, float]


def pack(b: torch.Tensor) -> torch.Tensor:
    """B [N, rank] as the kernel reads it: [ceil(N / 32), rank, 32], zeros past N."""
    columns, rank = b.shape
    packed = b.new_zeros((-(-columns // PACKED_COLUMNS), rank, PACKED_COLUMNS))
    whole = columns // PACKED_COLUMNS
    packed[:whole] = b[: whole * PACKED_COLUMNS].view(whole, PACKED_COLUMNS, rank).transpose(1, 2)
    if columns % PACKED_COLUMNS:
        packed[whole, :, : columns % PACKED_COLUMNS] = b[whole * PACKED_COLUMNS :].t()
    return packed


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack`."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:columns]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's share of a layer: y = (y + scaling * (x a^T) B^T) * scale + shift.

    a: [rank, K]; b: `pack` of B [N, rank], or B itself where `row_major` (on a GPU); both in the dtype of x, or None
    where the rank is 0. scale, shift: [N] float32 or None.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float = 1.0
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    row_major: bool = False

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    def for_device(self, columns: int, device: torch.device, row_major: bool) -> LoraWeights:
        """The same share of a layer of `columns` out-features, as that device's kernels read it."""
        if row_major == self.row_major and device.type == "cpu":
            return self
        b = self.b
        if b is not None and row_major != self.row_major:
            b = unpack(b, columns).contiguous() if row_major else pack(b)
        a, b, scale, shift = (None if t is None else send(t, device) for t in (self.a, b, self.scale, self.shift))
        return LoraWeights(a, b, self.scaling, scale, shift, row_major)


class LoraTable:
    """The adapters of one layer [in_features -> out_features], by slot. Slots that hold none change nothing.

    rows: first and end of the out-features that the kernel computes; None: all. They begin at a multiple of
    `PACKED_COLUMNS`, by which B is packed.
    entries: the rows that the kernel reads, of which a GPU has a copy of its own; replaced by larger ones when a slot
    lies outside (`put` says so). max_rank: the largest rank that was ever in it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        slots: int = 8,
        device: torch.device = _CPU,
        row_major: bool = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.rows = rows or (0, out_features)
        self.dtype = dtype
        self.device = device
        self.row_major = row_major
        self.max_rank = 0
        self._weights: dict[int, LoraWeights] = {}
        self._hold(np.zeros(slots, _ENTRY))

    def _hold(self, entries: np.ndarray) -> None:
        self.entries = entries
        self._mirror = _mirror(entries, self.device)
        self.address: int = self._mirror.data_ptr()

    @property
    def num_rows(self) -> int:
        """Out-features that the kernel computes."""
        return self.rows[1] - self.rows[0]

    def get(self, slot: int) -> LoraWeights | None:
        return self._weights.get(slot)

    def __len__(self) -> int:
        return len(self._weights)

    def put(self, slot: int, weights: LoraWeights) -> bool:
        """Fill a slot; True when the table has moved, and recordings that read it must go.

        Raises ValueError for tensors that do not fit the layer.
        """
        self._check(weights)
        moved = slot >= len(self.entries)
        if moved:
            self.grow(max(slot + 1, 2 * len(self.entries)))
        # What is sized by the largest rank has moved too, then.
        moved |= weights.rank > self.max_rank and self.device.type != "cpu"
        self.max_rank = max(self.max_rank, weights.rank)
        self._weights[slot] = weights
        before = self.rows[0] * self.dtype.itemsize * weights.rank  # bytes of B, packed or not
        floats = 4 * self.rows[0]
        tensors = (weights.a, 0), (weights.b, before), (weights.scale, floats), (weights.shift, floats)
        addresses = (0 if t is None else t.data_ptr() + skipped for t, skipped in tensors)
        self._write(slot, (*addresses, weights.rank, weights.scaling))
        return moved

    def grow(self, slots: int) -> None:
        """Have so many slots, if there are fewer: it moves."""
        if slots > len(self.entries):
            entries = np.zeros(slots, _ENTRY)
            entries[: len(self.entries)] = self.entries
            self._hold(entries)

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        if self._weights.pop(slot, None) is not None:
            self._write(slot, 0)

    def _write(self, slot: int, row: object) -> None:
        self.entries[slot] = row
        if self.device.type != "cpu":
            size = _ENTRY.itemsize
            row_bytes = torch.from_numpy(self.entries[slot : slot + 1].view(np.uint8))
            overwrite(self._mirror[slot * size : (slot + 1) * size], row_bytes)

    def _check(self, weights: LoraWeights) -> None:
        rank, blocks = weights.rank, -(-self.out_features // PACKED_COLUMNS)
        wanted = {
            "a": ((rank, self.in_features), self.dtype),
            "b": ((self.out_features, rank) if self.row_major else (blocks, rank, PACKED_COLUMNS), self.dtype),
            "scale": ((self.out_features,), torch.float32),
            "shift": ((self.out_features,), torch.float32),
        }
        if (weights.a is None) != (weights.b is None):
            raise ValueError("a, b: expected both or neither")
        for name, (shape, dtype) in wanted.items():
            tensor: torch.Tensor | None = getattr(weights, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: expected {list(shape)} {dtype}, contiguous, got {list(tensor.shape)} {tensor.dtype}"
                )
            if tensor.device.type != self.device.type:
                raise ValueError(f"{name}: expected a tensor on {self.device}, got one on {tensor.device}")
        if weights.row_major is not self.row_major:
            raise ValueError(f"b: expected row_major={self.row_major}")


class HasShape(Protocol):
    @property
    def shape(self) -> torch.Size: ...


def check_tables(
    tables: Sequence[LoraTable | None], weights: Sequence[HasShape], features: int, dtype: torch.dtype
) -> None:
    """Raise ValueError where a table is not its weight's: [N, features], for x of dtype."""
    if len(tables) != len(weights):
        raise ValueError(f"tables: expected one or None for each of {len(weights)} weights, got {len(tables)}")
    for table, weight in zip(tables, weights):  # noqa: B905 (the lengths were compared above)
        if table is None:
            continue
        rows = num_rows(weight.shape)
        if table.in_features != features or table.num_rows != rows or table.dtype is not dtype:
            wanted, got = f"{[rows, features]} {dtype}", f"[{table.num_rows}, {table.in_features}] {table.dtype}"
            raise ValueError(f"tables: expected one for a weight {wanted}, got one for {got}")


class LoraSegments:
    """Who owns which of the `num_rows` rows of a call: at most `capacity` segments, ordered by their first row.

    A mixture of adapters names its rows once for each of them, one after the other; `layers` is the most times that
    rows may be named.
    """

    def __init__(self, capacity: int, num_rows: int, device: torch.device = _CPU, layers: int = 1) -> None:
        self.entries = np.zeros(capacity, _SEGMENT)
        self.num_rows = num_rows
        self.device = device
        self.layers = layers
        self._mirror = _mirror(self.entries, device)
        self.address: int = self._mirror.data_ptr()
        self.rows: Sequence[Segment] = ()
        self._derived: dict[int | tuple[int, ...], LoraSegments] = {}  # by how often rows are repeated, or by the rows

    @classmethod
    def of(cls, rows: Sequence[Segment], num_rows: int, device: torch.device = _CPU) -> LoraSegments:
        segments = cls(len(rows), num_rows, device, times_named(rows))
        segments.fill(rows)
        return segments

    def for_rows(self, count: int) -> LoraSegments:
        """Those of a call of `count` rows. Raises ValueError where they are another call's."""
        if count != self.num_rows:
            raise ValueError(
                f"segments: a call with {count} rows, and adapters are known for {self.num_rows}. A layer that sees "
                "other rows than the step's tokens, one by one, is called within `repeated` or `gathered` "
                "(docs/adding-a-model.md, Rows)"
            )
        return self

    def repeated(self, times: int) -> LoraSegments:
        """Those of a call that has each row `times` times, one after the other."""
        return self._derive(times, self.num_rows * times, len(self.entries))

    def gathered(self, places: tuple[int, ...]) -> LoraSegments:
        """Those of a call whose row i is row places[i] of this one. Raises IndexError for a row that is none."""
        if places and not 0 <= min(places) <= max(places) < self.num_rows:
            raise IndexError(f"gathered: rows {min(places)} to {max(places)}, and there are {self.num_rows}")
        return self._derive(places, len(places), len(places) * self.layers)

    def _derive(self, how: int | tuple[int, ...], num_rows: int, capacity: int) -> LoraSegments:
        found = self._derived.get(how)
        if found is None:
            found = self._derived[how] = LoraSegments(capacity, num_rows, self.device, self.layers)
            found.fill(_derived_rows(self.rows, self.num_rows, how))
        return found

    def fill(self, rows: Sequence[Segment]) -> None:
        """Replace what it holds, and what was derived from it, in place.

        Raises ValueError for more than `capacity` segments.
        """
        if len(rows) > len(self.entries):
            raise ValueError(f"rows: expected at most {len(self.entries)} segments, got {len(rows)}")
        self.rows = rows
        self.entries[: len(rows)] = rows
        self.entries[len(rows) :] = 0
        if self.device.type != "cpu":
            overwrite(self._mirror, torch.from_numpy(self.entries.view(np.uint8)))
        for how, derived in self._derived.items():
            derived.fill(_derived_rows(rows, self.num_rows, how))


class AllRows(LoraSegments):
    """All rows of every call, however many it has, for the same adapters, as an image's encoding has it."""

    def __init__(self, slots: Sequence[tuple[int, float]], device: torch.device = _CPU) -> None:
        """slots: (slot, weight) of each adapter."""
        super().__init__(len(slots), 0, device)
        self._slots = slots

    def for_rows(self, count: int) -> LoraSegments:
        return LoraSegments.of([(0, count, slot, weight) for slot, weight in self._slots], count, self.device)

    def repeated(self, times: int) -> LoraSegments:
        return self

    def gathered(self, places: tuple[int, ...]) -> LoraSegments:
        return self


def _derived_rows(rows: Sequence[Segment], num_rows: int, how: int | tuple[int, ...]) -> Sequence[Segment]:
    """Segments of a call that repeats each of the rows (a number) or takes some (their places)."""
    if isinstance(how, int):
        return [(start * how, end * how, slot, weight) for start, end, slot, weight in rows]
    groups: list[list[tuple[int, float]]] = []
    group = np.full(num_rows, -1)  # of each row; -1: none
    for i, (start, end, slot, weight) in enumerate(rows):
        if i and rows[i - 1][:2] == (start, end):
            groups[-1].append((slot, weight))
            continue
        group[start:end] = len(groups)
        groups.append([(slot, weight)])
    chosen = group[list(how)] if how else group[:0]
    starts = np.flatnonzero(np.diff(chosen, prepend=-1)).tolist()
    return [
        (start, end, slot, weight)
        for start, end in pairwise([*starts, len(how)])
        if chosen[start] >= 0
        for slot, weight in groups[chosen[start]]
    ]


def times_named(rows: Sequence[Segment]) -> int:
    """The most times that the same rows are named, one segment after the other."""
    most = run = 1
    for before, after in pairwise(rows):
        run = run + 1 if before[:2] == after[:2] else 1
        most = max(most, run)
    return most


def _mirror(entries: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same bytes where the device's kernels can read them: on the CPU, the same memory."""
    return send(torch.from_numpy(entries.view(np.uint8)), device)
