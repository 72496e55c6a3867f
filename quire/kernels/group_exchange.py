"""The exchange of processes that share no memory: by torch.distributed.

Over gloo every process sends its columns to each other one, with what they are columns of in front: a message may be
shorter than what is asked for there, so that one of another shape is refused and no memory is written wrongly. (In an
`all_gather` of gloo's, it ends the process.) Where each process has a GPU of its own, they gather by NCCL, and the host
waits for nothing.

Neither is a kernel's call. It is an operation of torch's, so that a step that is recorded does it again between
kernels (`operations.py`).
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed
from torch.nn.functional import pad

from quire.kernels.exchange import PLACE_BYTES, Columns, ExchangeError, check_columns

dist: Any = torch.distributed  # half of which has no types
_HEADER_BYTES = 64  # turn, rows, columns, bytes of an element, as int64; then nothing

Parts = Sequence[tuple[int, int]]  # of a process's columns among all: where each begins and ends


class _Gathering(ABC):
    """What is told and asked for alike, however it is sent. group: a torch.distributed `ProcessGroup`."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.group = group
        self._broken: str | None = None
        self._number = next(_numbers)
        _exchanges[self._number] = self

    def gather(self, own: torch.Tensor, columns: Columns) -> torch.Tensor:
        """As `Exchange` has it. Raises ValueError for a row that no message takes, and for columns of others;
        ExchangeError where another process is found to be gone, or at another call."""
        check_columns(own, columns, self.rank)
        whole = torch.empty((own.shape[0], columns.total), dtype=own.dtype, device=own.device)
        torch.ops.quire.exchange_columns(whole, own, self._number, columns.ends)
        return whole

    def least(self, number: int) -> int:
        """As `Exchange` has it."""
        return int(self.gather(torch.tensor([[number]]), Columns([[1] * self.size])).min())

    def put_together(self, whole: torch.Tensor, own: torch.Tensor, ends: Sequence[int]) -> None:
        """Write all processes' columns: own's, and those that are sent. ends: `Columns.ends`."""
        if self._broken is not None:
            raise ExchangeError(self._broken)
        self._put_together(whole, own, self._parts(ends))

    def _parts(self, ends: Sequence[int]) -> list[Parts]:
        """Of each process."""
        parts = [list(pairwise(ends[at : at + self.size + 1])) for at in range(0, len(ends), self.size + 1)]
        return [[part[rank] for part in parts] for rank in range(self.size)]

    @abstractmethod
    def _put_together(self, whole: torch.Tensor, own: torch.Tensor, of_process: Sequence[Parts]) -> None: ...

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no narrower one
            self._broken = f"a process that computes the model with this one is gone: {error}"
            raise ExchangeError(self._broken) from error


class GroupExchange(_Gathering):
    """By messages from each process to each, which lie in main memory: columns of GPUs go through it. group: of
    gloo."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(group, rank, size)
        # Memory that is never written to is never taken.
        self._messages = [torch.empty(_HEADER_BYTES + PLACE_BYTES, dtype=torch.uint8) for _ in range(size)]
        for message in self._messages:
            message[:_HEADER_BYTES].zero_()
        self._header = self._messages[rank][:_HEADER_BYTES].view(torch.int64)

    def _put_together(self, whole: torch.Tensor, own: torch.Tensor, of_process: Sequence[Parts]) -> None:
        row_bytes = whole.shape[1] * whole.element_size()
        most = PLACE_BYTES // row_bytes if row_bytes else whole.shape[0] or 1
        for row in range(0, whole.shape[0], most):
            self._put_some(whole[row : row + most], own[row : row + most], of_process)

    def _put_some(self, whole: torch.Tensor, own: torch.Tensor, of_process: Sequence[Parts]) -> None:
        rows, element = own.shape[0], own.element_size()
        self._header[0] += 1
        for place, number in enumerate((rows, whole.shape[1], element), 1):
            self._header[place] = number
        widths = [sum(end - first for first, end in parts) for parts in of_process]
        counts = [rows * width * element for width in widths]
        mine = self._messages[self.rank]
        mine[_HEADER_BYTES : _HEADER_BYTES + counts[self.rank]].copy_(own.reshape(-1).view(torch.uint8))
        with self._sending():
            self._send(counts)
        for rank, (message, parts) in enumerate(zip(self._messages, of_process, strict=True)):
            if rank != self.rank:
                self._check(message)
            theirs = message[_HEADER_BYTES : _HEADER_BYTES + counts[rank]].view(own.dtype).view(rows, widths[rank])
            at = 0
            for first, end in parts:
                whole[:, first:end] = theirs[:, at : at + end - first]
                at += end - first

    def _send(self, counts: Sequence[int]) -> None:
        """Send this process's message, and fill the others'. counts: of the bytes behind the headers."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        waiting = [self.group.recv([self._messages[rank]], rank, 0) for rank in others]
        mine = self._messages[self.rank][: _HEADER_BYTES + counts[self.rank]]
        waiting += [self.group.send([mine], rank, 0) for rank in others]
        for work in waiting:
            work.wait()

    def _check(self, message: torch.Tensor) -> None:
        if not torch.equal(message[:_HEADER_BYTES].view(torch.int64), self._header):
            self._broken = "processes that compute one model are not at the same place of it"
            raise ExchangeError(self._broken)


class CollectiveExchange(_Gathering):
    """By a collective, of parts that are all as wide as the widest: what NCCL has. group: of NCCL; device: the GPU that
    is this process's alone.

    The GPU gathers when its turn comes; nobody waits for its numbers, and shapes are not compared. So a process may go
    on where another one has failed: it must wait for its GPU before it says of a step that it has failed
    (`Worker.settle`), so that they do not begin the next one at different places.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(group, rank, size)
        self._device = device
        self._sources: dict[tuple[Parts, ...], torch.Tensor] = {}

    def gather(self, own: torch.Tensor, columns: Columns) -> torch.Tensor:
        """own: of any device, which has what is gathered, too."""
        return super().gather(own.to(self._device), columns).to(own.device)

    def _put_together(self, whole: torch.Tensor, own: torch.Tensor, of_process: Sequence[Parts]) -> None:
        if not whole.numel():  # for everybody
            return
        rows, widest = own.shape[0], max(sum(end - first for first, end in parts) for parts in of_process)
        mine = pad(own, (0, widest - own.shape[1]))
        all_of_them = own.new_empty((self.size * rows, widest))
        with self._sending():
            self.group._allgather_base(all_of_them.view(torch.uint8), mine.view(torch.uint8)).wait()
        side_by_side = all_of_them.view(self.size, rows, widest).transpose(0, 1).reshape(rows, self.size * widest)
        torch.index_select(side_by_side, 1, self._sources_of(of_process, widest), out=whole)

    def _sources_of(self, of_process: Sequence[Parts], widest: int) -> torch.Tensor:
        """Where each column of the whole comes from, of the processes' parts side by side."""
        key = tuple(tuple(parts) for parts in of_process)
        sources = self._sources.get(key)
        if sources is None:
            of_column = [0] * sum(end - first for parts in key for first, end in parts)
            for rank, parts in enumerate(key):
                at = rank * widest
                for first, end in parts:
                    of_column[first:end] = range(at, at + end - first)
                    at += end - first
            sources = self._sources[key] = torch.tensor(of_column, dtype=torch.int64, device=self._device)
        return sources


def join_group(host: str, port: int, address: str, rank: int, size: int, seconds: float, name: str = "") -> Any:
    """Meet the other processes: a `ProcessGroup` of gloo. host, port: of the store where they meet (`meeting_store`);
    name: of the group there; address: of this process, by which the others reach it; seconds: that one waits for
    another. Raises ExchangeError."""
    try:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # torch's default asks for a name
        options._timeout = timedelta(seconds=seconds)
        return dist.ProcessGroupGloo(_store(host, port, seconds, name), rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"processes that compute one model have not met at {host}:{port}: {error}") from error


def join_gpus(host: str, port: int, rank: int, size: int, seconds: float, name: str = "") -> Any:
    """Join processes that have a GPU each, the current one, and meet at their first exchange: a `ProcessGroup` of NCCL.
    The arguments are `join_group`'s. Raises ExchangeError where there is no store."""
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        return dist.ProcessGroupNCCL(_store(host, port, seconds, name), rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"processes that compute one model have not met at {host}:{port}: {error}") from error


def _store(host: str, port: int, seconds: float, name: str) -> Any:
    return dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds)))


_numbers = count()
_exchanges: WeakValueDictionary[int, _Gathering] = WeakValueDictionary()  # operations' arguments are plain

# An operation that a recording may do again: it writes into given memory, and its shape depends on no number.
_library = torch.library.Library("quire", "FRAGMENT")
_library.define("exchange_columns(Tensor(a!) whole, Tensor own, int exchange, int[] ends) -> ()")


def _exchange_columns(whole: torch.Tensor, own: torch.Tensor, exchange: int, ends: list[int]) -> None:
    _exchanges[exchange].put_together(whole, own, ends)


_library.impl("exchange_columns", _exchange_columns, "CompositeExplicitAutograd")


def meeting_store(host: str) -> Any:
    """Where the processes of a group meet; its `port` tells where. host: the address of this machine that it listens
    at. It is needed until all have met, and as long as a group of NCCL's is: its threads look there."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
