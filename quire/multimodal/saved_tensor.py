"""One tensor that a stranger sent: base64 of the file that torch.save writes of it.

torch reads it, with `weights_only`, but only once the file was looked at from outside: it is copied entry by entry into
a new archive, so that nothing is unpacked, lies twice or is hidden from one of two readers; and of a pickle, which is a
program, nothing may be called but what makes one tensor of numbers that the archive has.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
import zipfile
from typing import Any

import torch

_ROOM = 64 << 10  # bytes of a file beside the tensor's numbers
_MOST_ENTRIES = 16  # of an archive; torch writes about seven
_MOST_PICKLE = 4096  # bytes; torch writes some hundred for one tensor
_MOST_CALLS = 4  # torch makes two: the tensor, and an empty dict of hooks
_READ = ("data.pkl", "byteorder", "version")  # of an archive, beside the numbers
_ENTRY = b"PK\x01\x02"  # what an archive's list has before each
_WIDEST = 8  # bytes of a number
_CALLED = frozenset(("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict"))
_STORAGES = frozenset(f"torch {kind}Storage" for kind in ("Float", "Half", "BFloat16", "Double"))


class _RefusedError(ValueError):
    """What is wrong, in words of this file's."""


def read_tensor(text: str, most_numbers: int) -> torch.Tensor:
    """The tensor, whose file has no more than most_numbers of them. Its shape (of a view it may be anything) and
    whether its numbers are finite are the caller's to check. Raises ValueError, with what is wrong.
    """
    most = most_numbers * _WIDEST + _ROOM
    if len(text) > 4 * -(-most // 3):
        raise ValueError(f"has {len(text):,} characters, and {most_numbers:,} numbers at most can be used")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is no base64: {error}") from None
    file, numbers = _copied(data)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of whatever kind: the file is a stranger's
        raise ValueError(f"is damaged, or no file of torch.save ({type(error).__name__})") from None
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"holds a {type(found).__name__}, not one tensor")
    if found.layout is not torch.strided or found.untyped_storage().nbytes() > numbers:
        raise ValueError("holds a tensor that has more numbers than the file")
    return found.detach()


def _copied(data: bytes) -> tuple[io.BytesIO, int]:
    """(the same archive, written anew; bytes of the numbers in it)"""
    if not data.startswith(b"PK\x03\x04"):
        raise _RefusedError("is no file of torch.save (of torch 1.6 or later)")
    if data.count(_ENTRY) > _MOST_ENTRIES:  # before a list of a million entries is read
        raise _RefusedError(f"is an archive of more than {_MOST_ENTRIES} entries: it must hold one tensor")
    copy = io.BytesIO()
    stored: list[int] = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(copy, "w") as written:
            entries = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED or one.compress_size != one.file_size for one in entries):
                raise _RefusedError("is compressed; torch.save does not compress")
            if sum(one.file_size for one in entries) > len(data) or len({one.filename for one in entries}) < len(
                entries
            ):
                raise _RefusedError("is damaged, or no file of torch.save (its entries overlap)")
            for entry in entries:
                name, content = entry.filename.partition("/")[2], archive.read(entry)
                if name == "data.pkl":
                    _check_pickle(content)
                elif name == "byteorder" and content != b"little":
                    raise _RefusedError("was written on a machine of the other byte order")
                elif name.startswith("data/"):
                    stored.append(len(content))
                if name in _READ or name.startswith("data/"):
                    written.writestr(entry.filename, content)
    except _RefusedError:
        raise
    except Exception as error:  # of zipfile and pickletools
        raise ValueError(f"is damaged, or no file of torch.save ({type(error).__name__})") from None
    if len(stored) > 1:  # torch believes a pickle that says how long each is, so that they could not be told apart
        raise _RefusedError("holds more than one tensor")
    copy.seek(0)
    return copy, sum(stored)


def _check_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle that names anything but what makes one tensor, without running it."""
    if len(content) > _MOST_PICKLE:
        raise _RefusedError("holds more than one tensor")
    calls = 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and argument not in _CALLED | _STORAGES:
            raise _RefusedError(f"asks for {_shown(argument)}, and one dense float tensor is all that it may hold")
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise _RefusedError("holds something else than one tensor")
        calls += opcode.name in ("REDUCE", "BUILD")
    if calls > _MOST_CALLS:
        raise _RefusedError("holds more than one tensor")


def _shown(name: Any) -> str:
    return repr(str(name).replace(" ", "."))[:120]
