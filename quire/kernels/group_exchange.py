"""The exchange of processes that share no memory: messages of torch.distributed.

Over gloo every process sends its columns to each other one, with what they are columns of in front: a message may be
shorter than what is asked for there, so that one of another shape is refused and no memory is written wrongly. (In an
`all_gather` of gloo's, it ends the process.)

Sending is no kernel's call. It is an operation of torch's, so that a step that is recorded does it again between
kernels (`operations.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from itertools import count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed

from quire.kernels.exchange import PLACE_BYTES, Columns, ExchangeError, check_columns

dist: Any = torch.distributed  # half of which has no types
_HEADER_BYTES = 64  # turn, rows, columns, bytes of an element, as int64; then nothing

Parts = Sequence[tuple[int, int]]  # of a process's columns among all: where each begins and ends


class GroupExchange:
    """By messages from each process to each. group: a `ProcessGroup` of gloo."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device | None = None) -> None:
        """device: of what is exchanged; None: the CPU."""
        self.rank, self.size = rank, size
        self.group = group
        self.device = device or torch.device("cpu")
        self._broken: str | None = None
        # Memory that is never written to is never taken.
        self._messages = [
            torch.empty(_HEADER_BYTES + PLACE_BYTES, dtype=torch.uint8, device=self.device) for _ in range(size)
        ]
        for message in self._messages:
            message[:_HEADER_BYTES].zero_()
        self._header = self._messages[rank][:_HEADER_BYTES].view(torch.int64)
        self._number = next(_numbers)
        _exchanges[self._number] = self

    def gather(self, own: torch.Tensor, columns: Columns) -> torch.Tensor:
        """As `Exchange` has it. Raises ValueError for a row that no message takes, and for columns of others;
        ExchangeError where another process is gone, or its call has another shape."""
        check_columns(own, columns, self.rank)
        whole = torch.empty((own.shape[0], columns.total), dtype=own.dtype, device=own.device)
        torch.ops.quire.exchange_columns(whole, own, self._number, columns.ends)
        return whole

    def least(self, number: int) -> int:
        own = torch.tensor([[number]], device=self.device)
        return int(self.gather(own, Columns([[1] * self.size])).min())

    def put_together(self, whole: torch.Tensor, own: torch.Tensor, ends: Sequence[int]) -> None:
        """Write all processes' columns: own's, and those that are sent. ends: `Columns.ends`."""
        parts = [list(pairwise(ends[at : at + self.size + 1])) for at in range(0, len(ends), self.size + 1)]
        of_process = [[part[rank] for part in parts] for rank in range(self.size)]
        row_bytes = whole.shape[1] * whole.element_size()
        most = PLACE_BYTES // row_bytes if row_bytes else whole.shape[0] or 1
        for row in range(0, whole.shape[0], most):
            self._put_some(whole[row : row + most], own[row : row + most], of_process)

    def _put_some(self, whole: torch.Tensor, own: torch.Tensor, of_process: Sequence[Parts]) -> None:
        if self._broken is not None:
            raise ExchangeError(self._broken)
        rows, element = own.shape[0], own.element_size()
        self._header[0] += 1
        for place, number in enumerate((rows, whole.shape[1], element), 1):
            self._header[place] = number
        widths = [sum(end - first for first, end in parts) for parts in of_process]
        counts = [rows * width * element for width in widths]
        mine = self._messages[self.rank]
        mine[_HEADER_BYTES : _HEADER_BYTES + counts[self.rank]].copy_(own.reshape(-1).view(torch.uint8))
        try:
            self._send(counts)
        except RuntimeError as error:  # torch has no narrower one
            self._broken = f"a process that computes the model with this one is gone: {error}"
            raise ExchangeError(self._broken) from error
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


class CollectiveExchange(GroupExchange):
    """By a collective, of messages that are all as long as the longest: NCCL has none that are shorter than asked for.

    A device's shapes are not compared, as nobody waits for its numbers: another shape is a step that hangs.
    """

    def _send(self, counts: Sequence[int]) -> None:
        length = _HEADER_BYTES + max(counts)
        theirs = [message[:length] for message in self._messages]
        self.group.allgather([theirs], [theirs[self.rank].clone()]).wait()

    def _check(self, message: torch.Tensor) -> None:
        if self.device.type == "cpu":
            super()._check(message)


def join_group(host: str, port: int, address: str, rank: int, size: int, seconds: float, name: str = "") -> Any:
    """Meet the other processes: a `ProcessGroup` of gloo. host, port: of the store where they meet (`meeting_store`);
    name: of the group there; address: of this process, by which the others reach it; seconds: that one waits for
    another. Raises ExchangeError."""
    try:
        limit = timedelta(seconds=seconds)
        store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=limit))
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # torch's default asks for a name
        options._timeout = limit
        return dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"processes that compute one model have not met at {host}:{port}: {error}") from error


_numbers = count()
_exchanges: WeakValueDictionary[int, GroupExchange] = WeakValueDictionary()  # operations' arguments are plain

# An operation that a recording may do again: it writes into given memory, and its shape depends on no number.
_library = torch.library.Library("quire", "FRAGMENT")
_library.define("exchange_columns(Tensor(a!) whole, Tensor own, int exchange, int[] ends) -> ()")


def _exchange_columns(whole: torch.Tensor, own: torch.Tensor, exchange: int, ends: list[int]) -> None:
    _exchanges[exchange].put_together(whole, own, ends)


_library.impl("exchange_columns", _exchange_columns, "CompositeExplicitAutograd")


def meeting_store(host: str) -> Any:
    """Where the processes of a group meet; its `port` tells where. host: the address of this machine that it listens
    at. It is needed until all have met."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
