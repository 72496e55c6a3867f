"""The file that a batch's answers go to: one line each, in the order in which they are ready."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from quire.errors import QuireError
from quire.server.batch.requests import REQUEST_ID, BatchRequest, lines, name_digest, read_object

_BEGINNING = b'{"id":"batch-'


@dataclass(frozen=True)
class Answered:
    """What the file has. names: `name_digest` of each answer's custom_id, one after the other; ids: of the answers'
    own. failed: how many are errors.
    """

    names: bytes
    ids: bytes
    failed: int


@dataclass(frozen=True)
class Answer:
    """What a route answered. body: JSON in one line."""

    status: int
    request_id: str
    body: bytes


class AnswerFile:
    """An existing file is gone on with: what it has is kept, but for a last line that was not written to its end.

    Use as a context manager; nobody else writes to the file meanwhile. Raises QuireError for a file that is in use, is
    no file of answers, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = ExitStack()

    def __enter__(self) -> AnswerFile:
        with self._held as held:
            try:
                self._is_new = not self._path.exists()
                self._file: BinaryIO = held.enter_context(open(self._path, "ab+"))
            except OSError as error:
                raise QuireError(f"{self._path}: cannot be written ({error.strerror or error}).") from None
            _lock(self._file, self._path)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_new and not self._file.seek(0, os.SEEK_END):  # nothing came of it
            with suppress(OSError):
                os.unlink(self._path)
        self._held.close()

    def read(self) -> Answered:
        """What has been answered. Mends the file's end."""
        last = _start_of_last(self._file, self._file.seek(0, os.SEEK_END))
        names, ids, failed = bytearray(), bytearray(), 0
        self._file.seek(0)
        for number, line in lines(self._file, None):
            try:
                given = read_object(line)
                custom_id, name, status = given["custom_id"], given["id"], given["response"]["status_code"]
                if not (isinstance(custom_id, str) and isinstance(name, str) and REQUEST_ID.fullmatch(name)):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                if self._file.tell() > last and _is_beginning(line):
                    self._file.truncate(last)
                    return Answered(bytes(names), bytes(ids), failed)
                raise QuireError(
                    f"{self._path}: line {number} is no answer of run-batch's: take another file."
                ) from None
            names += name_digest(custom_id)
            ids += name_digest(name)
            failed += status != 200
        if last < self._file.tell():
            self._write(b"\n")
        return Answered(bytes(names), bytes(ids), failed)

    def add(self, request: BatchRequest, answer: Answer) -> None:
        """One line, which is in the file when this returns."""
        head = {"id": request.id, "custom_id": request.custom_id}
        response = {"status_code": answer.status, "request_id": answer.request_id}
        parts = [_open(head), b',"response":', _open(response), b',"body":', answer.body, b'},"error":null}\n']
        self._write(b"".join(parts))

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise QuireError(f"{self._path}: cannot be written ({error.strerror or error}).") from None


def _is_beginning(line: bytes) -> bool:
    """Whether a line may be half an answer: a file of something else is not to be cut."""
    return line[: len(_BEGINNING)] == _BEGINNING[: len(line)]


def _open(head: Mapping[str, object]) -> bytes:
    """A JSON object without its closing bracket."""
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()[:-1]


def _start_of_last(file: BinaryIO, end: int) -> int:
    """Where the line begins that ends with the file; the file's end, if a line break stands there."""
    step, at = 1 << 16, end
    while at > 0:
        begin = max(0, at - step)
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise QuireError(f"{path}: another run-batch writes to it.") from None
