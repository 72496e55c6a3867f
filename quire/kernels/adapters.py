"""What `linear` reads of adapters: for each weight a table of their shares, and for each call who owns which rows.

Both lie in memory at fixed addresses and are changed in place, so that a recorded step serves any mixture of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# The rows of csrc/cpu/kernels.h's LoraEntry and LoraSegment.
_ENTRY = np.dtype([("a", "<u8"), ("b", "<u8"), ("scale", "<u8"), ("shift", "<u8"), ("rank", "<i8"), ("scaling", "<f8")])
_SEGMENT = np.dtype([("start", "<i8"), ("end", "<i8"), ("slot", "<i8"), ("weight", "<f8")])
_COLUMNS = 32  # kLoraColumns

# start, end, slot, weight: rows start .. end are those of the adapter in `slot`, whose share counts `weight` times.
Segment = tuple[int, int, int, float]


def pack(b: torch.Tensor) -> torch.Tensor:
    """B [N, rank] as the kernel reads it: [ceil(N / 32), rank, 32], zeros past N."""
    columns, rank = b.shape
    packed = b.new_zeros((-(-columns // _COLUMNS), rank, _COLUMNS))
    whole = columns // _COLUMNS
    packed[:whole] = b[: whole * _COLUMNS].view(whole, _COLUMNS, rank).transpose(1, 2)
    if columns % _COLUMNS:
        packed[whole, :, : columns % _COLUMNS] = b[whole * _COLUMNS :].t()
    return packed


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `pack`."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:columns]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's share of a layer: y = (y + scaling * (x a^T) B^T) * scale + shift.

    a: [rank, K]; b: `pack` of B [N, rank]; both in the dtype of x, or None where the rank is 0. scale, shift: [N]
    float32 or None.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float = 1.0
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]


class LoraTable:
    """The adapters of one layer [in_features -> out_features], by slot. Slots that hold none change nothing.

    entries: the rows that the kernel reads; replaced by a larger copy when a slot lies outside (`put` says so).
    """

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, slots: int = 8) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.entries = np.zeros(slots, _ENTRY)
        self.address: int = self.entries.ctypes.data
        self._weights: dict[int, LoraWeights] = {}

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
            entries = np.zeros(max(slot + 1, 2 * len(self.entries)), _ENTRY)
            entries[: len(self.entries)] = self.entries
            self.entries, self.address = entries, entries.ctypes.data
        self._weights[slot] = weights
        tensors = (weights.a, weights.b, weights.scale, weights.shift)
        addresses = (0 if t is None else t.data_ptr() for t in tensors)
        self.entries[slot] = (*addresses, weights.rank, weights.scaling)
        return moved

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        if self._weights.pop(slot, None) is not None:
            self.entries[slot] = 0

    def _check(self, weights: LoraWeights) -> None:
        rank, blocks = weights.rank, -(-self.out_features // _COLUMNS)
        wanted = {
            "a": ((rank, self.in_features), self.dtype),
            "b": ((blocks, rank, _COLUMNS), self.dtype),
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
            if not tensor.is_cpu:
                raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")


class LoraSegments:
    """Who owns which rows of a call: at most `capacity` segments, ordered by their first row.

    A mixture of adapters names its rows once for each of them, one after the other.
    """

    def __init__(self, capacity: int) -> None:
        self.entries = np.zeros(capacity, _SEGMENT)
        self.address: int = self.entries.ctypes.data
        self.rows: Sequence[Segment] = ()

    @classmethod
    def of(cls, rows: Sequence[Segment]) -> LoraSegments:
        segments = cls(len(rows))
        segments.fill(rows)
        return segments

    def for_rows(self, count: int) -> LoraSegments:
        """As they are: they were made for a call of `count` rows."""
        return self

    def fill(self, rows: Sequence[Segment]) -> None:
        """Replace what it holds. Raises ValueError for more than `capacity` segments."""
        if len(rows) > len(self.entries):
            raise ValueError(f"rows: expected at most {len(self.entries)} segments, got {len(rows)}")
        self.rows = rows
        self.entries[: len(rows)] = rows
        self.entries[len(rows) :] = 0


class AllRows(LoraSegments):
    """One owner of all rows of every call, however many it has: what an image's encoding belongs to."""

    def __init__(self, owners: Sequence[tuple[int, float]]) -> None:
        super().__init__(len(owners))
        self._owners = owners

    def for_rows(self, count: int) -> LoraSegments:
        return LoraSegments.of([(0, count, slot, weight) for slot, weight in self._owners])
