"""Checkpoints of torch.save: pytorch_model.bin, read by torch's `weights_only` loading in a process of its own.

A .bin file is a pickle beside raw numbers (https://pytorch.org/docs/stable/notes/serialization.html). The process
(`quire.checkpoint.confined`) runs the pickle and says where each tensor's numbers lie; the numbers themselves are read
from the file by this process, as those of a safetensors file are. So nothing is converted, copied or left behind, and
what the pickle could do at its worst is to describe other tensors. Only where the system does not say where something
is mapped (it is no Linux), and of files from before torch 1.6, which are no zip archives, the numbers are copied once,
into a temporary file without a name.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch

from quire.checkpoint import confined
from quire.errors import CheckpointError

# Tensors of these are made of plain numbers. (What the model takes of them is the loader's to say.)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
                  torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}  # fmt: skip

_SECONDS = 60.0  # for the process to start and read a small file
_BYTES_A_SECOND = 20_000_000  # of a file that has to be read whole, on a slow disk
_ROOM = 512 << 20  # bytes beside what is in the file
_TORCH = 1 << 30  # bytes that torch itself may take
_ALIGNMENT = 64  # bytes
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # nothing of it is written, so no memory need be kept for it
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's numbers lie: from byte `start` of the file on, with strides in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


class PickledFile:
    """The tensors of one .bin file, by name, as views of a memory map.

    origin: the .bin file. file: where the numbers are: that, or what was copied of it.
    """

    def __init__(self, origin: BufferedReader, file: FileIO | BufferedReader, tensors: Mapping[str, Stored]) -> None:
        self.origin = origin
        self.file = file
        self._tensors = tensors
        self.starts = {name: stored.start for name, stored in tensors.items()}
        self.shapes = {name: stored.shape for name, stored in tensors.items()}
        size = os.fstat(file.fileno()).st_size
        # Private and writable, as torch wants a buffer; nobody writes.
        self._map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE | _NO_RESERVE) if size else None

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        extent = _extent(stored.shape, stored.stride)
        if self._map is None or not extent:
            return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
        flat = torch.frombuffer(self._map, dtype=stored.dtype, count=extent, offset=stored.start)
        return flat.as_strided(stored.shape, stored.stride)


def open_pickles(paths: Sequence[Path], files: Sequence[BufferedReader]) -> list[PickledFile]:
    """Read .bin files, which are open, in one process for all of them. Raises CheckpointError."""
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    seconds = _SECONDS + sum(sizes) / _BYTES_A_SECOND
    memory = _TORCH + _ROOM + 2 * max(sizes)
    with tempfile.TemporaryFile() as copy:
        numbers = [file.fileno() for file in files]
        job = {"files": numbers, "sizes": sizes, "copy": copy.fileno(), "seconds": seconds}
        try:
            answer = confined.run(f"{__name__}:_describe", job, [*numbers, copy.fileno()], seconds, memory)
        except confined.ConfinedError as error:
            raise CheckpointError(f"{_listed(paths)}: is refused: {error}.") from None
        if "error" in answer:
            raise CheckpointError(f"{paths[answer['file']]}: {answer['error']}")
        opened = []
        for path, file, described in zip(paths, files, answer["files"], strict=True):
            source = FileIO(os.dup(copy.fileno())) if described["copied"] else file
            opened.append(PickledFile(file, source, _checked(path, source, described["tensors"])))
        return opened


def _listed(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} (or one of the {len(paths) - 1} files beside it)"


def _checked(path: Path, file: FileIO | BufferedReader, described: Mapping[str, Any]) -> dict[str, Stored]:
    """What the process has said, each tensor within the file. It ran the pickle: nothing that it says is believed."""
    size = os.fstat(file.fileno()).st_size
    tensors = {}
    for name, (dtype, shape, stride, start) in described.items():
        numbers = [*shape, *stride, start]
        if dtype not in _DTYPES or len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{path}: {name!r} is described as {(dtype, shape, stride, start)!r}: no tensor.")
        stored = Stored(_DTYPES[dtype], tuple(shape), tuple(stride), start)
        if start + _extent(shape, stride) * stored.dtype.itemsize > size:
            raise CheckpointError(f"{path}: {name!r} reaches beyond the end of the file.")
        tensors[name] = stored
    return tensors


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


# -- in the process -----------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """The file is none that is taken, and why."""


def _describe(job: dict[str, Any]) -> dict[str, Any]:
    """Each file's tensors, or the first error and the number of its file."""
    _warm_up()
    size = max(job["sizes"])
    copy = Copy(job["copy"])
    confined.confine(job["seconds"], 2 * size + _ROOM, sum(job["sizes"]) + (1 << 20))
    described = []
    for number, descriptor in enumerate(job["files"]):
        try:
            described.append(describe(descriptor, copy))
        except Exception as error:
            return {"file": number, "error": explain(error)}
    return {"files": described}


def _warm_up() -> None:
    """Have everything imported that reading imports when it is first used."""
    with tempfile.TemporaryFile() as file:
        torch.save({"a": torch.zeros(1)}, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)


def describe(descriptor: int, copy: Copy) -> dict[str, Any]:
    """One file's tensors. Raises what torch.load raises, or what `explain` knows."""
    with open(descriptor, "rb", closefd=False) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
        if is_zip:
            _check_archive(file)
        file.seek(0)
        if is_zip and (tensors := _described_in_place(descriptor)) is not None:
            return {"copied": False, "tensors": tensors}
        read = torch.load(file, map_location="cpu", weights_only=True)
        return {"copied": True, "tensors": {n: copy.place(t) for n, t in _state_dict(read).items()}}


def _described_in_place(descriptor: int) -> dict[str, list[Any]] | None:
    """The tensors of an archive, and where in it their numbers are; None where the system does not say."""
    path = f"/proc/self/fd/{descriptor}"
    if not os.path.exists(path) or sys.byteorder != "little":
        return None
    mapped = _state_dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    regions = _regions(descriptor, path)
    tensors = {}
    for name, tensor in mapped.items():
        address = tensor.data_ptr()
        inside = [offset + address - first for first, end, offset in regions if first <= address < end]
        start = inside[0] if inside else 0
        if tensor.numel() and not (inside and _is_there(tensor, descriptor, start)):
            return None
        tensors[name] = _place(tensor, start)
    return tensors


def _is_there(tensor: torch.Tensor, descriptor: int, start: int) -> bool:
    """Whether the file has a tensor's first numbers there: what says so is not its loader, but the system."""
    count = min(_extent(tensor.shape, tensor.stride()), 64)
    first = tensor.detach().as_strided((count,), (1,)).contiguous().view(torch.uint8).numpy().tobytes()
    return os.pread(descriptor, len(first), start) == first


def _check_archive(file: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise _RefusedError(f"{entry.filename!r} is compressed in it; torch.save does not compress")
            if os.path.basename(entry.filename) == "byteorder" and archive.read(entry) != b"little":
                raise _RefusedError("it was written on a machine of the other byte order")


def _state_dict(loaded: object) -> dict[str, torch.Tensor]:
    if not isinstance(loaded, dict):
        raise _RefusedError(f"it holds a {type(loaded).__name__}, not a dict of tensors")
    for name, value in loaded.items():
        if not isinstance(name, str):
            raise _RefusedError(f"the name {name!r:.100} in it is no text")
        if isinstance(value, dict):
            raise _RefusedError(
                f"{name!r} in it is a dict of its own: it is a training checkpoint, of which the weights alone can be "
                "taken. Save them as a file of their own: "
                f"torch.save(torch.load(path, weights_only=True)[{name!r}], 'pytorch_model.bin')"
            )
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise _RefusedError(f"{name!r} in it is of type {type(value).__name__}, and tensors alone are weights")
        dtype = str(value.dtype).removeprefix("torch.")
        kind = str(value.layout).removeprefix("torch.") if value.layout is not torch.strided else dtype
        if kind not in _DTYPES or value.is_neg():  # of a negative view, the numbers that lie there are others
            kind += " (a negative view)" if value.is_neg() else ""
            raise _RefusedError(f"{name!r} in it is a tensor of {kind} numbers, which no model takes")
    return loaded


def _regions(descriptor: int, path: str) -> list[tuple[int, int, int]]:
    """Where a file is mapped: [(first address, end, offset in the file)].

    By its name or its inode: file systems in layers show another device here, some another inode too.
    """
    name, inode = os.readlink(path), str(os.fstat(descriptor).st_ino)
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, number, *shown = line.split(maxsplit=5)
        if number == inode or shown == [name]:
            first, end = (int(address, 16) for address in addresses.split("-"))
            regions.append((first, end, int(offset, 16)))
    return regions


def _place(tensor: torch.Tensor, start: int) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), start]


class Copy:
    """The temporary file: each storage once, whatever tensors share it."""

    def __init__(self, descriptor: int) -> None:
        self._file = open(descriptor, "wb", closefd=False)  # noqa: SIM115 (it ends with the process)
        self._starts: dict[int, int] = {}
        self._end = 0

    def place(self, tensor: torch.Tensor) -> list[Any]:
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() not in self._starts:
            self._starts[storage.data_ptr()] = self._end
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._file.seek(self._end)
            self._file.write(whole.numpy().data)
            self._file.flush()
            self._end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        first = self._starts[storage.data_ptr()] if tensor.numel() else 0
        start = first + int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0
        return _place(tensor, start)


def explain(error: Exception) -> str:
    """What to tell the one who gave the file."""
    if isinstance(error, _RefusedError):
        return f"is refused: {error}."
    text = str(error)
    forbidden = re.search(r"GLOBAL (\S+)", text)
    if forbidden:
        return f"is refused: it is a pickle that asks for {forbidden[1]!r}, and files of weights hold tensors alone."
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "Cannot allocate memory" in text:
        return f"is refused: reading it takes more memory than its size and {_ROOM >> 20} MiB."
    if "legacy .tar format" in text:
        return "is refused: it is in the tar format of torch before 0.2, which cannot be read safely."
    if "TorchScript" in text:
        return "is refused: it is a TorchScript program, not a file of weights."
    unread = re.search(r"WeightsUnpickler error:\s*(\S.*)", text)
    if unread:  # torch's own advice, to load it without the check, is not repeated
        return f"is damaged or no file of torch.save: {unread[1][:200]}"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"is damaged or no file of torch.save: {type(error).__name__}: {first[:300]}"
