"""Keys and values of preempted sequences in main memory: the tensors behind `SwapSpace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire import kernels
from quire.contracts import KVCache

# Main memory is taken in pieces of so many bytes, as pinning all of it at the start would take seconds. A copy stays
# within one, which bounds what a GPU must set aside for it too.
_PIECE_BYTES = 64 << 20


class HostCache:
    """Blocks in main memory, each with the keys and values of all layers. Those of one piece lie side by side.

    On a GPU all is done in the order of the stream, and nobody waits: what is copied out was written by the steps
    before, and a block here may be overwritten as soon as the copy that reads it was started.
    """

    def __init__(self, caches: Sequence[KVCache], device: torch.device) -> None:
        self._device = device
        self._pinned = device.type != "cpu"
        self._kernels = kernels.cuda_backend() if self._pinned else None
        tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
        # [blocks, bytes] each
        self._blocks = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]
        self._block_bytes = self._blocks[0].shape[1]
        self._piece_blocks = max(1, _PIECE_BYTES // (len(tensors) * self._block_bytes))
        self._pieces: list[torch.Tensor] = []  # each [blocks of a piece, tensors, bytes]
        self._addresses: torch.Tensor | None = None  # of self._blocks, on the device

    def save(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the device to blocks here, (from, to)."""
        for part in self._parts(moves):
            packed = self._gather([source for source, _ in part])
            for place, piece, first, count in self._runs([target for _, target in part]):
                piece[first : first + count].copy_(packed[place : place + count], non_blocking=True)

    def fetch(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from here to blocks of the device, (from, to)."""
        for part in self._parts(moves):
            packed = self._room(len(part))
            for place, piece, first, count in self._runs([source for source, _ in part]):
                packed[place : place + count].copy_(piece[first : first + count], non_blocking=True)
            self._scatter(packed, [target for _, target in part])

    def _parts(self, moves: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
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
        shape = self._piece_blocks, len(self._blocks), self._block_bytes
        while len(self._pieces) <= number:
            self._pieces.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned))
        return self._pieces[number]

    def _gather(self, sources: Sequence[int]) -> torch.Tensor:
        """Blocks of the device, [blocks, tensors, bytes]."""
        index = self._send(sources)
        if self._kernels is None:
            return torch.stack([blocks[index] for blocks in self._blocks], dim=1)
        packed = self._room(len(sources))
        self._kernels.gather_blocks(self._where(), len(self._blocks[0]), self._block_bytes, index, packed)
        return packed

    def _scatter(self, packed: torch.Tensor, targets: Sequence[int]) -> None:
        index = self._send(targets)
        if self._kernels is not None:
            self._kernels.scatter_blocks(self._where(), len(self._blocks[0]), self._block_bytes, index, packed)
            return
        for place, blocks in enumerate(self._blocks):
            blocks[index] = packed[:, place]

    def _room(self, count: int) -> torch.Tensor:
        """For so many blocks on the device. Whoever gets this memory next uses it later in the stream."""
        return torch.empty((count, len(self._blocks), self._block_bytes), dtype=torch.uint8, device=self._device)

    def _send(self, numbers: Sequence[int]) -> torch.Tensor:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._pinned else tensor

    def _where(self) -> torch.Tensor:
        if self._addresses is None:
            self._addresses = self._send([blocks.data_ptr() for blocks in self._blocks])
        return self._addresses
