"""The weights' memory: one block of the process's own.

A memory map of the files would cost nothing at start, but its pages of 4 KB cost every token: reading the same
weights takes half as long again from there on a virtual machine (docs/architecture.md has the figures). Reading
them in costs a fifth of a second a gigabyte or more, and a file that is cut or replaced later harms nobody.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from quire import huge_pages
from quire.checkpoint.files import Checkpoint
from quire.errors import CheckpointError

_ALIGNMENT = 64  # bytes
_PIECE = 16 << 20  # bytes that a thread reads at a time
_THREADS = 4


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a parameter is made of that no tensor of the files is as it stands: one expert's share of all experts', say.

    shapes: of the stored tensors, by name; none, if its numbers stand elsewhere in the files. make: of these, in that
    order, the parameter. dtypes: what each of them may be of; floats, where it is not named. either_way: files may have
    the last two dimensions in the other order, too: releases differ in what they write.
    """

    shapes: Mapping[str, torch.Size]
    make: Callable[..., torch.Tensor]
    dtypes: Mapping[str, Collection[torch.dtype]] = field(default_factory=dict)
    either_way: bool = False

    def fits(self, name: str, shape: torch.Size) -> bool:
        """Whether a stored tensor may have this shape."""
        return shape == self.shapes[name] or (self.either_way and shape == _turned(self.shapes[name]))


def _turned(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-2], *reversed(shape[-2:])))


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter or a buffer, and the name and the layout in which the checkpoint has it.

    dtype: that it is to have; None: the model's. part: of what it is made, if `stored` is not it. rows: first and end
    of those that are read; the shape stays whole, and the others' memory is not touched (of a GPU, it is not theirs:
    `packed`); None: all.
    """

    name: str
    stored: str
    shape: torch.Size
    transposed: bool  # stored [in, out]
    dtype: torch.dtype | None = None
    part: StoredPart | None = None
    rows: tuple[int, int] | None = None

    @property
    def num_read(self) -> int:
        """Numbers that are read."""
        if self.rows is None:
            return math.prod(self.shape)
        first, end = self.rows
        return (end - first) * math.prod(self.shape[1:])

    @property
    def tensors(self) -> Sequence[str]:
        """The names of what it is made of."""
        return (self.stored,) if self.part is None else tuple(self.part.shapes)


@torch.inference_mode(False)  # the caller's mode does not reach the threads, which could not write then
def read_weights(
    checkpoint: Checkpoint, wanted: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device
) -> dict[str, nn.Parameter]:
    """Return the tensors on `device`, by name, read in several threads. dtype: the model's. Raises CheckpointError."""
    extents = [_extent(w, (w.dtype or dtype).itemsize) for w in wanted]
    if device.type == "cpu":
        starts, size = side_by_side(extents)
        taken = sum(extent.read for extent in extents)  # pages that nobody writes to are never there
    else:
        starts, size = packed(extents)
        taken = size
    available = huge_pages.available_bytes(device)
    if taken > available:
        raise CheckpointError(
            f"{checkpoint.directory}: the weights take {taken:,} bytes as {str(dtype).removeprefix('torch.')}, "
            f"and {available:,} are available: free some, or take a smaller model or dtype."
        )
    on_cpu = device.type == "cpu"
    memory = huge_pages.allocate(size) if on_cpu else torch.empty(size, dtype=torch.uint8, device=device)
    tensors = [
        memory[start : start + extent.size].view(w.dtype or dtype).view(w.shape)
        for w, start, extent in zip(wanted, starts, extents, strict=True)
    ]
    read_into(checkpoint, list(zip(wanted, tensors, strict=True)))
    return {w.name: nn.Parameter(t, requires_grad=False) for w, t in zip(wanted, tensors, strict=True)}


class Extent(NamedTuple):
    """Bytes of a tensor: in front of what is read of it, of that, and behind it."""

    front: int
    read: int
    behind: int

    @property
    def size(self) -> int:
        return sum(self)


def _extent(wanted: StoredWeight, itemsize: int) -> Extent:
    size = math.prod(wanted.shape) * itemsize
    if wanted.rows is None:
        return Extent(0, size, 0)
    front = wanted.rows[0] * math.prod(wanted.shape[1:]) * itemsize
    read = wanted.num_read * itemsize
    return Extent(front, read, size - front - read)


def side_by_side(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """Where tensors begin in one block of memory, each with room for all of it, and the block's bytes."""
    starts, end = [], 0
    for extent in extents:
        starts.append(end)
        end += _aligned(extent.size)
    return starts, end


def packed(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """The same, with room for what is read alone. What is not read of a tensor lies over others: nobody may write it,
    or make anything of it (a later stage of a pipeline looks tokens up there, and throws that away). Before and behind
    everything there is room for so much of it as would stand out."""
    starts, end = [0] * len(extents), 0
    # Those that have the most behind come first, those that have the most in front last: next to nothing stands out.
    for place in sorted(range(len(extents)), key=lambda place: extents[place].front - extents[place].behind):
        starts[place] = end - extents[place].front
        end += _aligned(extents[place].read)
    before = _aligned(max(0, -min(starts, default=0)))
    last = max((start + extent.size for start, extent in zip(starts, extents, strict=True)), default=0)
    return [before + start for start in starts], before + max(end, last)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@torch.inference_mode(False)
def read_into(checkpoint: Checkpoint, wanted: Sequence[tuple[StoredWeight, torch.Tensor]]) -> None:
    """Read tensors, each into contiguous memory of its own, in several threads. Raises CheckpointError."""
    jobs = [job for w, tensor in wanted for job in _jobs(checkpoint, w, tensor)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        try:
            for done in [threads.submit(job) for job in jobs]:
                done.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # an error or Ctrl-C does not wait for the rest
            raise


def _jobs(checkpoint: Checkpoint, wanted: StoredWeight, out: torch.Tensor) -> list[Callable[[], object]]:
    if wanted.rows == (0, 0):
        return []
    if wanted.part is not None:
        return [partial(_make, checkpoint, wanted, out)]
    stored = checkpoint.tensor(wanted.stored)
    if wanted.transposed or stored.dtype is not out.dtype or not stored.is_contiguous():
        rows = slice(*(wanted.rows or (None,)))
        turned = stored.t() if wanted.transposed else stored
        return [partial(out.copy_, turned) if wanted.rows is None else partial(out[rows].copy_, turned[rows])]
    flat, step = out.view(-1), _PIECE // out.element_size()
    begin = 0 if wanted.rows is None else wanted.rows[0] * math.prod(wanted.shape[1:])
    end = begin + wanted.num_read
    read = checkpoint.read if out.is_cpu else partial(_read_across, checkpoint)
    return [
        partial(read, wanted.stored, flat[first : min(first + step, end)], first) for first in range(begin, end, step)
    ]


def _make(checkpoint: Checkpoint, wanted: StoredWeight, out: torch.Tensor) -> None:
    assert wanted.part is not None
    made = _made_of(checkpoint, wanted.part)
    if wanted.rows is None:
        out.copy_(made)
    else:
        rows = slice(*wanted.rows)
        out[rows].copy_(made[rows])


def _made_of(checkpoint: Checkpoint, part: StoredPart) -> torch.Tensor:
    stored = {name: checkpoint.tensor(name) for name in part.shapes}
    return part.make(*(one if one.shape == part.shapes[name] else one.mT for name, one in stored.items()))


def made(checkpoint: Checkpoint, wanted: StoredWeight) -> torch.Tensor:
    """One tensor in the form that its place asks for, in the files' dtype. Raises CheckpointError."""
    if wanted.part is not None:
        return _made_of(checkpoint, wanted.part)
    stored = checkpoint.tensor(wanted.stored)
    return stored.t() if wanted.transposed else stored


def _read_across(checkpoint: Checkpoint, name: str, out: torch.Tensor, first: int) -> None:
    """Read a piece by way of memory from which the device copies while the next piece is read."""
    piece = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
    checkpoint.read(name, piece, first)
    out.copy_(piece, non_blocking=True)
