"""The tensors of a GGUF model, with the methods of `checkpoint.files.Checkpoint`, under the files' own names.

Quantized ones are rows of bytes, [rows, row_bytes] uint8, as they lie in the file; `kind_of` says what they mean. Which
parameter takes which rows, `names` says.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import torch

from quire.checkpoint.files import Checkpoint
from quire.checkpoint.gguf.file import GgufFile
from quire.checkpoint.gguf.header import block_of
from quire.checkpoint.plain import open_plain
from quire.errors import CheckpointError

# Kinds that are numbers as they stand.
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}


class GgufCheckpoint(Checkpoint):
    """directory: what messages name. Raises CheckpointError throughout."""

    def __init__(self, directory: Path, file: GgufFile) -> None:
        self.directory = directory
        self.file = file
        self._opened: dict[Path, BufferedReader] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        try:
            for path in file.paths:
                self._opened[path] = open_plain(path)
                self._maps[path] = mmap.mmap(self._opened[path].fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        for name, tensor in file.tensors.items():
            if tensor.start + tensor.nbytes > len(self._maps[file.places[name]]):
                raise CheckpointError(f"{file.places[name]}: {name!r} ends behind the file: it was cut.")

    def names(self) -> Iterator[str]:
        return iter(self.file.tensors)

    def kind_of(self, name: str) -> int:
        """GGML's number of a tensor's kind."""
        return self.file.tensors[name].kind

    def columns(self, name: str) -> int:
        """Numbers of a row."""
        return self.file.tensors[name].shape[-1]

    def shape(self, name: str) -> tuple[int, ...]:
        """As `tensor` gives it: a quantized one's last is bytes."""
        tensor = self.file.tensors[name]
        if tensor.kind in FLOATS:
            return tensor.shape
        columns, size = block_of(tensor.kind)
        return (*tensor.shape[:-1], tensor.shape[-1] // columns * size)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file's memory map, whose pages are read when first touched."""
        tensor, path = self.file.tensors[name], self.file.places[name]
        dtype = FLOATS.get(tensor.kind, torch.uint8)
        count = tensor.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._maps[path], dtype=dtype, count=count, offset=tensor.start)
        return flat.view(self.shape(name))

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """As `Checkpoint.read`."""
        path = self.file.places[name]
        target: memoryview = out.view(-1).view(torch.uint8).numpy().data
        at = self.file.tensors[name].start + first * out.element_size()
        try:
            while target:
                count = os.preadv(self._opened[path].fileno(), [target], at)
                if not count:
                    raise CheckpointError(f"{path}: ended before {name!r} did: it was cut while it was read.")
                target, at = target[count:], at + count
        except OSError as error:
            raise CheckpointError(f"{path}: {name!r} cannot be read: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, in numbers."""
        return {name: tensor.shape for name, tensor in self.file.tensors.items()}

    def file_of(self, name: str) -> str:
        return self.file.places[name].name

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """As `Checkpoint.stamp`."""
        stats = [(path.name, os.fstat(one.fileno())) for path, one in self._opened.items()]
        return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in sorted(stats))
