"""A step's numbers on their way to a GPU: laid end to end in pinned memory and sent by a copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 16  # bytes
_RING = 3  # steps that may be on their way: one runs, one is queued, one is written
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


@dataclass(frozen=True)
class Packed:
    """Arrays in one piece of a device's memory. places: name -> (offset in bytes, shape, dtype)."""

    buffer: torch.Tensor
    places: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]

    def tensor(self, name: str) -> torch.Tensor:
        """A view of one array."""
        offset, shape, dtype = self.places[name]
        size = int(np.prod(shape)) * dtype.itemsize
        return self.buffer[offset : offset + size].view(dtype).view(shape)

    def clone(self) -> Packed:
        return Packed(self.buffer.clone(), self.places)

    def take(self, other: Packed) -> None:
        """Overwrite all arrays with those of the same places."""
        if other.places != self.places:
            raise ValueError("other arrays than these")
        self.buffer.copy_(other.buffer)


class Staging:
    """Sends arrays to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._ring: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * _RING
        self._sent: list[torch.cuda.Event | None] = [None] * _RING
        self._turn = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> Packed:
        """Start the copy of int32 and int64 arrays; they are there for whatever the current stream does next."""
        places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        end = 0
        for name, array in arrays.items():
            places[name] = end, array.shape, _DTYPES[array.dtype]
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = (self._turn + 1) % _RING
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # long past, unless the GPU is steps behind
        if self._ring[self._turn].numel() < end:
            self._ring[self._turn] = torch.empty(2 * end, dtype=torch.uint8, pin_memory=self._pinned)
        staged = self._ring[self._turn][:end]
        bytes_ = staged.numpy()
        for name, array in arrays.items():
            start = places[name][0]
            bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = torch.empty(end, dtype=torch.uint8, device=self._device)
        buffer.copy_(staged, non_blocking=True)
        if self._pinned:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._sent[self._turn] = event
        return Packed(buffer, places)
