"""The form that brings an adapter: its fields and files, written to a folder as they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from quire.lora.peft_config import MAX_CONFIG_BYTES
from quire.server.responses.errors import ApiError
from quire.server.uploads.archive import unpack
from quire.server.uploads.names import KEPT, FileNames

_ARCHIVE = "upload.zip"
_TEXTS = ("lora_name", "base_model_name")
_SWITCHES = ("load_inplace",)
_FILES = "files"
_LONGEST_FIELD = 4096  # bytes
_ON, _OFF = ("true", "1", "on"), ("false", "0", "off", "")


class AdapterForm:
    """Takes a form's parts, as `multipart.Parts` has it, and writes files into a folder, which must be there.

    For one thread at a time. All methods raise ApiError for what is not to be had; the folder may hold anything then.
    """

    def __init__(self, folder: Path, account: Callable[[int], None], most: int) -> None:
        """account: told of each number of bytes before they are written. most: bytes of the files, unpacked."""
        self.fields: dict[str, Any] = {}
        self._folder = folder
        self._account = account
        self._most = most
        self._names = FileNames()
        self._inside = FileNames()  # of an archive
        self._archive: str | None = None
        self._field = ""
        self._text = bytearray()
        self._file: BinaryIO | None = None
        self._kept: str | None = None
        self._sizes: dict[str, int] = {}

    @property
    def ignored(self) -> list[str]:
        """The files that an adapter does not need, and that were not kept."""
        return [*self._names.ignored, *self._inside.ignored]

    def begin(self, name: str, filename: str | None) -> None:
        self._field, self._kept = name, None
        self._text.clear()
        if name == _FILES:
            if filename is None:
                raise ApiError(400, "files: a part has no filename: send each file as a part of its own.", "files")
            self._begin_file(filename)
        elif name not in (*_TEXTS, *_SWITCHES):
            known = ", ".join((*_TEXTS, *_SWITCHES, _FILES))
            raise ApiError(400, f"{name[:100]}: there is no such field; there are {known}.", name)
        elif name in self.fields:
            raise ApiError(400, f"{name}: is there twice.", name)

    def data(self, data: bytes) -> None:
        if self._field != _FILES:
            self._text += data
            if len(self._text) > _LONGEST_FIELD:
                raise ApiError(400, f"{self._field}: has more than {_LONGEST_FIELD} bytes.", self._field)
        elif self._kept is not None:
            self._write(self._kept, data)

    def end(self) -> None:
        self._close()
        if self._field == _FILES:
            return
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"{self._field}: is not UTF-8.", self._field) from None
        self.fields[self._field] = _switch(self._field, text) if self._field in _SWITCHES else text

    def finish(self) -> int:
        """The form has come whole: unpack what is packed, and see that nothing is missing. The bytes that are kept."""
        if self._archive is not None:
            if len(self._sizes) > 1 or self._names.ignored:
                raise ApiError(400, "files: send a .zip, or an adapter's files, and not both.", "files")
            self._sizes.clear()
            unpack(self._folder / _ARCHIVE, self._inside, self._write)
            self._close()
            (self._folder / _ARCHIVE).unlink()
        missing = [name for name in KEPT if name not in self._sizes]
        if "lora_name" not in self.fields:
            raise ApiError(400, "lora_name: the form has no such field.", "lora_name")
        if missing:
            raise ApiError(400, f"files: {missing[0]} is not among them.", "files")
        return sum(self._sizes.values())

    def abandon(self) -> None:
        """Let go of what is open."""
        self._close()

    def _begin_file(self, filename: str) -> None:
        if filename.lower().endswith(".zip") and "/" not in filename and "\\" not in filename:
            if self._archive is not None:
                raise ApiError(400, "files: send one .zip.", "files")
            self._archive = self._kept = _ARCHIVE
        else:
            self._kept = self._names.take(filename)
        if self._kept is not None:
            self._open(self._kept)

    def _open(self, name: str) -> None:
        self._close()
        self._sizes[name] = 0
        self._file = open(self._folder / name, "xb", buffering=0)  # noqa: SIM115 (as long as its part comes)

    def _write(self, name: str, data: bytes) -> None:
        if name not in self._sizes:
            self._open(name)
        self._sizes[name] += len(data)
        if name == KEPT[0] and self._sizes[name] > MAX_CONFIG_BYTES:
            raise ApiError(400, f"files: {name} has more than {MAX_CONFIG_BYTES:,} bytes.", "files")
        if sum(self._sizes.values()) > self._most:
            raise ApiError(
                413,
                f"files: have more than {self._most:,} bytes, packed or unpacked, which is the limit "
                "(--max-adapter-upload-bytes).",
                "files",
            )
        self._account(len(data))
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _switch(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in (*_ON, *_OFF):
        raise ApiError(400, f"{name}: must be true or false.", name)
    return value in _ON
