"""Safetensors files (https://huggingface.co/docs/safetensors) written one tensor at a time.

The package's own writer takes all tensors of a file at once, which need not fit into memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.checkpoint.files import INDEX, SINGLE
from quire.checkpoint.safetensors_header import DTYPES

_NAMES: Mapping[torch.dtype, str] = {
    dtype: name
    for name, (torchs, _) in DTYPES.items()
    if isinstance(dtype := getattr(torch, torchs, None), torch.dtype)
}
_ALIGNMENT = 64  # bytes, of a file's first tensor


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: Path, planned: Sequence[Planned], make: Callable[[str], torch.Tensor], largest: int
) -> Iterator[int]:
    """Write tensors to files of `largest` bytes at most, or of one tensor, with an index where there are several files.

    make: a tensor, by its name, when it is its turn. Yields the bytes of each as it is written. Raises OSError.
    """
    files: list[list[Planned]] = [[]]
    for one in planned:
        if files[-1] and sum(other.nbytes for other in files[-1]) + one.nbytes > largest:
            files.append([])
        files[-1].append(one)
    where: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        where.update({one.name: name for one in tensors})
        yield from _write(folder / name, tensors, make)
    if len(files) > 1:
        total = sum(one.nbytes for one in planned)
        write_text(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))


def _write(path: Path, tensors: Sequence[Planned], make: Callable[[str], torch.Tensor]) -> Iterator[int]:
    # The largest elements first: so all are aligned.
    ordered = sorted(tensors, key=lambda one: -one.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in ordered:
        start, end = end, end + one.nbytes
        header[one.name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            tensor = make(one.name)
            if tensor.dtype is not one.dtype or tuple(tensor.shape) != one.shape:
                raise ValueError(
                    f"{one.name}: planned as {one.dtype} {one.shape}, and is {tensor.dtype} {tensor.shape}"
                )
            if one.nbytes:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            yield one.nbytes
        _synced(file)


def write_text(path: Path, text: str) -> None:
    """Write a file whole. Raises OSError."""
    with path.open("xb") as file:
        file.write(text.encode() + b"\n")
        _synced(file)


def _synced(file: object) -> None:
    file.flush()  # type: ignore[attr-defined]
    os.fsync(file.fileno())  # type: ignore[attr-defined]
