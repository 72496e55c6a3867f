"""The pool's tensors, block by block: copied, gathered and scattered over all layers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from quire import kernels
from quire.kernels.transfer import send
from quire.platform.execution.kv_tensors import keys_of, states_of
from quire.types import KVCache, StateCache

Move = tuple[int, int]  # (from, to)


class PoolBlocks:
    """Keys and values of all layers: a block is its group's share of each tensor. On a GPU each call is one kernel, or
    two where values have another size than keys, in the order of the stream; nobody waits.

    States are copied too; no GPU has any, and they are neither gathered nor scattered.
    """

    def __init__(self, caches: Sequence[KVCache | StateCache]) -> None:
        self._states = states_of(caches)
        self._num_states = len(self._states[0]) if self._states else 0
        tensors = keys_of(caches)
        self.device = tensors[0].device
        self._kernels: ModuleType | None = kernels.cuda_backend() if self.device.type == "cuda" else None
        alike: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            blocks = tensor.view(torch.uint8).view(len(tensor), -1)
            alike.setdefault(blocks.shape[1], []).append(blocks)
        # Torch copies numbers one by one, eight bytes as fast as one.
        word = torch.uint8 if any(size % 8 for size in alike) else torch.int64
        self._parts = [_Part(blocks, word) for blocks in alike.values()]
        self.bytes_a_block = sum(part.bytes_a_block for part in self._parts)  # of all tensors together
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def room(self, count: int) -> torch.Tensor:
        """For so many packed blocks on the device, [count, bytes]. Whoever gets this memory next uses it later in the
        stream."""
        return torch.empty((count, self.bytes_a_block), dtype=torch.uint8, device=self.device)

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy blocks one after the other: a target may be a later move's source."""
        if self._states:
            moves = self._copy_states(moves)
        for run in independent(moves):
            sources, targets = (self._send(side) for side in zip(*run, strict=True))
            for part in self._parts:
                if self._kernels is not None:
                    self._kernels.copy_blocks(*part.where(), sources, targets)
                    continue
                for words in part.words:
                    words.index_copy_(0, targets, words.index_select(0, sources))

    def _copy_states(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Copy those of the blocks that are states; returns the others."""
        for source, target in moves:
            if source < self._num_states:
                for blocks in self._states:
                    blocks[target] = blocks[source]
        return [move for move in moves if move[0] >= self._num_states]

    def gather(self, sources: Sequence[int]) -> torch.Tensor:
        """Blocks in memory of their own, packed: [blocks, bytes]."""
        index = self._send(sources)
        packed = [self._gather_part(part, index) for part in self._parts]
        return packed[0] if len(packed) == 1 else torch.cat(packed, dim=1)

    def _gather_part(self, part: _Part, index: torch.Tensor) -> torch.Tensor:
        if self._kernels is None:
            return torch.cat([words.index_select(0, index) for words in part.words], dim=1).view(torch.uint8)
        packed = torch.empty((len(index), *part.shape), dtype=torch.uint8, device=self.device)
        self._kernels.gather_blocks(*part.where(), index, packed)
        return packed.view(len(index), -1)

    def scatter(self, packed: torch.Tensor, targets: Sequence[int]) -> None:
        """The reverse."""
        index = self._send(targets)
        for part, own in zip(self._parts, packed.split([part.bytes_a_block for part in self._parts], 1), strict=True):
            rows = own.unflatten(1, part.shape)
            if self._kernels is not None:
                self._kernels.scatter_blocks(*part.where(), index, rows.contiguous())
                continue
            for words, row in zip(part.words, rows.unbind(1), strict=True):
                words.index_copy_(0, index, row.view(words.dtype))

    def _send(self, numbers: Sequence[int]) -> torch.Tensor:
        return send(torch.tensor(numbers, dtype=torch.int64), self.device)


class _Part:
    """Tensors whose blocks take the same bytes. blocks: each [blocks, bytes] uint8. words: the same,
    [blocks, words] of a dtype. shape: (tensors, bytes)."""

    def __init__(self, blocks: list[torch.Tensor], word: torch.dtype) -> None:
        self.blocks = blocks
        self.words = [one.view(word) for one in blocks]
        self.shape = len(blocks), blocks[0].shape[1]
        self.bytes_a_block = len(blocks) * blocks[0].shape[1]
        self._known: list[int] = []  # addresses; a GPU's memory that was given back has others afterwards
        self._addresses: torch.Tensor | None = None  # the same on the device

    def where(self) -> tuple[torch.Tensor, int, int]:
        """What the kernels take first: addresses, number of blocks, bytes of a block in one tensor."""
        addresses = [blocks.data_ptr() for blocks in self.blocks]
        if self._addresses is None or addresses != self._known:
            self._known = addresses
            self._addresses = send(torch.tensor(addresses, dtype=torch.int64), self.blocks[0].device)
        return self._addresses, len(self.blocks[0]), self.blocks[0].shape[1]


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
