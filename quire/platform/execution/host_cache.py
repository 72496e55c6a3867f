"""Keys and values of preempted sequences in main memory: the tensors behind `SwapSpace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.platform.execution.pool_blocks import Move, PoolBlocks

# Main memory is taken in pieces of so many bytes, as pinning all of it at the start would take seconds. A copy stays
# within one, which bounds what a GPU must set aside for it too.
_PIECE_BYTES = 64 << 20


class HostCache:
    """Blocks in main memory, each with the keys and values of all layers. Those of one piece lie side by side.

    On a GPU all is done in the order of the stream, and nobody waits: what is copied out was written by the steps
    before, and a block here may be overwritten as soon as the copy that reads it was started.
    """

    def __init__(self, pool: PoolBlocks) -> None:
        self._pool = pool
        self._piece_blocks = max(1, _PIECE_BYTES // pool.bytes_a_block)
        self._pieces: list[torch.Tensor] = []  # each [blocks of a piece, bytes]

    def save(self, moves: Sequence[Move]) -> None:
        """Copy blocks of the device to blocks here."""
        for part in self._parts(moves):
            packed = self._pool.gather([source for source, _ in part])
            for place, piece, first, count in self._runs([target for _, target in part]):
                piece[first : first + count].copy_(packed[place : place + count], non_blocking=True)

    def fetch(self, moves: Sequence[Move]) -> None:
        """Copy blocks from here to blocks of the device."""
        for part in self._parts(moves):
            packed = self._pool.room(len(part))
            for place, piece, first, count in self._runs([source for source, _ in part]):
                packed[place : place + count].copy_(piece[first : first + count], non_blocking=True)
            self._pool.scatter(packed, [target for _, target in part])

    def _parts(self, moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
        for at in range(0, len(moves), self._piece_blocks):
            yield moves[at : at + self._piece_blocks]

    def _runs(self, hosts: Sequence[int]) -> Iterator[tuple[int, torch.Tensor, int, int]]:
        """Blocks here that lie side by side, to be copied at once: (place among `hosts`, piece, first, count)."""
        place = 0
        while place < len(hosts):
            number, first = divmod(hosts[place], self._piece_blocks)
            count = 1
            while (
                place + count < len(hosts)
                and first + count < self._piece_blocks
                and hosts[place + count] == hosts[place] + count
            ):
                count += 1
            yield place, self._piece(number), first, count
            place += count

    def _piece(self, number: int) -> torch.Tensor:
        shape = self._piece_blocks, self._pool.bytes_a_block
        while len(self._pieces) <= number:
            pinned = self._pool.device.type == "cuda"
            self._pieces.append(torch.empty(shape, dtype=torch.uint8, pin_memory=pinned))
        return self._pieces[number]
