"""The pool's tensors, block by block: copied, gathered and scattered over all layers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from quire import kernels
from quire.kernels.transfer import send
from quire.types import KVCache

Move = tuple[int, int]  # (from, to)


class PoolBlocks:
    """Keys and values of all layers. On a GPU each call is one kernel, in the order of the stream; nobody waits."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
        self.device = tensors[0].device
        self._blocks = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]  # [blocks, bytes] each
        self._kernels: ModuleType | None = kernels.cuda_backend() if self.device.type == "cuda" else None
        self._addresses: torch.Tensor | None = None  # of self._blocks, on the device

    @property
    def bytes_a_block(self) -> int:
        """Of all tensors together."""
        return len(self._blocks) * self._blocks[0].shape[1]

    def room(self, count: int) -> torch.Tensor:
        """For so many packed blocks on the device, [count, tensors, bytes]. Whoever gets this memory next uses it later
        in the stream."""
        return torch.empty((count, *self.packed_shape), dtype=torch.uint8, device=self.device)

    @property
    def packed_shape(self) -> tuple[int, int]:
        """Of one block: [tensors, bytes]."""
        return len(self._blocks), self._blocks[0].shape[1]

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy blocks one after the other: a target may be a later move's source."""
        for part in independent(moves):
            sources, targets = (self._send(side) for side in zip(*part, strict=True))
            if self._kernels is not None:
                self._kernels.copy_blocks(*self._where(), sources, targets)
                continue
            for blocks in self._blocks:
                blocks[targets] = blocks[sources]

    def gather(self, sources: Sequence[int]) -> torch.Tensor:
        """Blocks in memory of their own, packed: [blocks, tensors, bytes]."""
        index = self._send(sources)
        if self._kernels is None:
            return torch.stack([blocks[index] for blocks in self._blocks], dim=1)
        packed = self.room(len(sources))
        self._kernels.gather_blocks(*self._where(), index, packed)
        return packed

    def scatter(self, packed: torch.Tensor, targets: Sequence[int]) -> None:
        """The reverse."""
        index = self._send(targets)
        if self._kernels is not None:
            self._kernels.scatter_blocks(*self._where(), index, packed)
            return
        for place, blocks in enumerate(self._blocks):
            blocks[index] = packed[:, place]

    def _send(self, numbers: Sequence[int]) -> torch.Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self.device)

    def _where(self) -> tuple[torch.Tensor, int, int]:
        """What the kernels take first: addresses, number of blocks, bytes of a block in one tensor."""
        if self._addresses is None:
            self._addresses = self._send([blocks.data_ptr() for blocks in self._blocks])
        return self._addresses, len(self._blocks[0]), self._blocks[0].shape[1]


def independent(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """The moves in order, cut into runs in which no block is both written and otherwise named."""
    run: list[Move] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in moves:
        if source in targets or target in sources or target in targets:
            yield run
            run, sources, targets = [], set(), set()
        run.append((source, target))
        sources.add(source)
        targets.add(target)
    if run:
        yield run
