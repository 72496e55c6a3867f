"""Columns that several processes have computed of one matrix, put together in each of them.

They go through memory that all processes of one machine map (csrc/cpu/common/exchange.h), where a call is recorded like
a kernel's; without such memory, by messages (`group_exchange.py`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

import quire.kernels._C as _C

_COUNTER_BYTES = 64  # kCounterBytes
PLACE_BYTES = 8 << 20  # of rows that are exchanged at once


class ExchangeError(RuntimeError):
    """Another process is gone, or at another place of the model: nothing can be computed with it any more."""


class Columns:
    """Which columns are whose, of parts that lie side by side. sizes[p][r]: how many of part p are process r's; those
    of one process lie side by side in the order of the parts.

    bounds: [P, size + 1] int64: columns bounds[p][r] .. bounds[p][r + 1] are process r's of part p. ends: the same as a
    list, row after row.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        ends = list(accumulate((n for part in sizes for n in part), initial=0))
        width = len(sizes[0])
        self.total = ends[-1]
        self.of_process = [sum(part[rank] for part in sizes) for rank in range(width)]
        self.bounds = torch.tensor([ends[p * width : (p + 1) * width + 1] for p in range(len(sizes))])
        self.ends: list[int] = self.bounds.flatten().tolist()


class Exchange(Protocol):
    """What the processes that compute one model together tell each other. All of them make the same calls, in the same
    order; each call waits for all."""

    def gather(self, own: torch.Tensor, columns: Columns) -> torch.Tensor:
        """own: [T, n], this process's columns, contiguous -> [T, N], those of all."""
        ...

    def least(self, number: int) -> int:
        """The least of the processes' numbers."""
        ...


class SharedExchange:
    """Through memory of one machine. descriptor: of the memory, as `shared_memory` makes it."""

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._memory = torch.frombuffer(mmap.mmap(descriptor, _bytes_for(size)), dtype=torch.uint8)

    def gather(self, own: torch.Tensor, columns: Columns) -> torch.Tensor:
        """As `Exchange` has it. Raises ValueError for a row that no place takes, and for columns of others;
        RuntimeError where another process's call has another shape."""
        check_columns(own, columns, self.rank)
        rows = own.shape[0]
        whole = torch.empty((rows, columns.total), dtype=own.dtype)
        _C.gather_columns(
            self._memory.data_ptr(), PLACE_BYTES, self.rank, self.size, own.data_ptr(), whole.data_ptr(), rows,
            columns.total, own.element_size(), columns.bounds.data_ptr(), len(columns.bounds),
        )  # fmt: skip
        return whole

    def least(self, number: int) -> int:
        return int(self.gather(torch.tensor([[number]]), Columns([[1] * self.size])).min())


def check_columns(own: torch.Tensor, columns: Columns, rank: int) -> None:
    """Raise ValueError where these are not the process's columns, or a row is too large to be exchanged."""
    if own.shape[1] != columns.of_process[rank] or not own.is_contiguous():
        raise ValueError(f"own: expected {columns.of_process[rank]} columns, contiguous, got {own.shape[1]}")
    row_bytes = columns.total * own.element_size()
    if row_bytes > PLACE_BYTES:
        raise ValueError(f"a row of {row_bytes:,} bytes: processes exchange rows of {PLACE_BYTES:,} at most")


def can_share_memory() -> bool:
    return hasattr(os, "memfd_create")


def shared_memory(size: int) -> int:
    """A descriptor of memory for an exchange of so many processes, of zeros."""
    descriptor = os.memfd_create("quire-exchange", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _bytes_for(size))
    return descriptor


def _bytes_for(size: int) -> int:
    return size * _COUNTER_BYTES + 2 * PLACE_BYTES
