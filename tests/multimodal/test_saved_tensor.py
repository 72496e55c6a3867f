"""Tensors that strangers send: every file that is not one plain tensor is refused, at little cost."""

from __future__ import annotations

import base64
import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.multimodal.saved_tensor import read_tensor

MOST = 640  # numbers
SAVED = torch.arange(64.0).reshape(4, 16)


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "tensor",
    [SAVED, SAVED.bfloat16(), SAVED.half(), SAVED.double(), SAVED.T, SAVED[1:3], SAVED[:1].expand(30, 16),
     torch.nn.Parameter(SAVED), torch.zeros(0, 16)],
    ids=["float", "bfloat16", "half", "double", "turned", "part", "expanded", "parameter", "empty"],
)  # fmt: skip
def test_what_torch_saves_is_read(tensor: torch.Tensor) -> None:
    found = read_tensor(text(saved(tensor)), MOST)
    assert found.dtype == tensor.dtype and not found.requires_grad
    assert torch.equal(found, tensor)


# -- no tensor -----------------------------------------------------------------------------------------------------


class Runs:
    """A pickle that calls something."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


OTHERS = {
    "dict": ({"a": SAVED}, "not one tensor"),
    "list": ([SAVED, SAVED], "holds a list"),
    "several": ([SAVED, SAVED + 1, SAVED + 2], "holds more than one tensor"),
    "number": (5, "holds a int"),
    "whole numbers": (torch.zeros(3, dtype=torch.int64), "torch.LongStorage"),
    "bytes": (torch.zeros(3, dtype=torch.uint8), "torch.ByteStorage"),
    "sparse": (SAVED.to_sparse(), "_rebuild_sparse_tensor"),
    "without values": (torch.empty(3, 16, device="meta"), "_rebuild_meta_tensor_no_storage"),
    "quantized": (torch.quantize_per_tensor(SAVED, 0.1, 0, torch.qint8), "torch"),
    "call": (Runs(print, ("hello",)), "'__builtin__.print'"),
    "memory": (Runs(bytearray, (1 << 40,)), "'__builtin__.bytearray'"),
    "long list": (list(range(5000)), "holds more than one tensor"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, message = OTHERS[name]
    with pytest.raises(ValueError) as error:
        read_tensor(text(saved(value)), MOST)
    assert message in str(error.value)
    assert capsys.readouterr().out == ""


NO_FILES: dict[str, tuple[str, str]] = {
    "no base64": ("%%%", "is no base64"),
    "cut base64": (text(saved(SAVED))[:-3], "is no base64"),
    "not ASCII": ("\u00e9" * 8, "is no base64"),
    "nothing": ("", "is no file of torch.save"),
    "text": (text(b"hello, world"), "is no file of torch.save"),
    "pickle": (text(pickle.dumps([1])), "is no file of torch.save"),
    "old form": (text(saved(SAVED, _use_new_zipfile_serialization=False)), "is no file of torch.save"),
    "cut": (text(saved(SAVED)[:-200]), "damaged"),
    "zip": (text(b"PK\x03\x04" + bytes(500)), "damaged"),
    "too long": (text(bytes(MOST * 8 + 100_000)), "640 numbers at most"),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_such_file_is_refused(name: str) -> None:
    given, message = NO_FILES[name]
    with pytest.raises(ValueError) as error:
        read_tensor(given, MOST)
    assert message in str(error.value)


# -- lies ----------------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """The saved tensor's archive with other contents."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(SAVED))) as old, zipfile.ZipFile(file, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
        for name, content in more.items():
            new.writestr(name.replace("__", "/"), content)
    return file.getvalue()


def same(name: str, content: bytes) -> bytes:
    return content


def in_pickle(old: bytes, new: bytes) -> bytes:
    def change(name: str, content: bytes) -> bytes:
        assert not name.endswith("data.pkl") or old in content
        return content.replace(old, new) if name.endswith("data.pkl") else content

    return rewritten(change)


def of_numbers(content: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, old: content if name.endswith("data/0") else old


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (lambda: rewritten(of_numbers(bytes(1 << 24)), zipfile.ZIP_DEFLATED), "compress"),
    "fewer numbers than it says": (lambda: rewritten(of_numbers(b"")), ""),
    "half of its numbers": (lambda: rewritten(of_numbers(bytes(128))), ""),
    # K\x40: 64 numbers; (K\x04K\x10: a shape of 4 x 16.
    "a larger shape": (lambda: in_pickle(b"K\x04K\x10\x86", b"K\x40K\x10\x86"), ""),
    "a huge shape": (lambda: in_pickle(b"K\x04K\x10\x86", b"J\xff\xff\xff\x7fK\x10\x86"), ""),
    "more stored than there is": (lambda: in_pickle(b"K\x40", b"J\x00\x00\x00\x10"), ""),
    "a second tensor's numbers": (lambda: rewritten(same, archive__data__1=bytes(4096)), "more than one tensor"),
    "another byte order": (
        lambda: rewritten(lambda name, old: b"big" if name.endswith("byteorder") else old), "byte order",
    ),
    "ten thousand entries": (lambda: rewritten(same, **{f"e{i}": b"" for i in range(200)}), "more than 16 entries"),
    "no pickle": (lambda: in_pickle(b"\x80\x02", b"\xff\xff"), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie_are_refused(name: str) -> None:
    make, message = LIES[name]
    given = text(make())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            read_tensor(given, 4096)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert message in str(error.value)


def test_entries_that_overlap_are_refused() -> None:
    """One run of bytes that counts as many."""
    data = bytearray(saved(SAVED))
    first = data.index(b"PK\x01\x02")
    entries, second = bytes(data[first:]), data.index(b"PK\x01\x02", first + 4)
    end = data.rindex(b"PK\x05\x06")
    doubled = bytes(data[:first]) + entries[: second - first] * 2 + bytes(data[second:end])
    tail = bytearray(data[end:])
    tail[12:16] = (len(doubled) - first).to_bytes(4, "little")
    with pytest.raises(ValueError):
        read_tensor(text(doubled + bytes(tail)), MOST)
