"""multipart/form-data (RFC 7578) read as it comes, in bounded memory.

Stricter than the RFC where senders agree: nothing stands before the first boundary, nothing behind the last one, no
blanks follow a boundary, and a part without a name is an error. Parts are searched for by `bytes.find`: no text makes
this slow.
"""

from __future__ import annotations

import re
from email.message import Message
from email.parser import HeaderParser
from enum import Enum
from typing import Protocol

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=?-]{1,70}")
_LONGEST_HEADER = 8 << 10  # bytes of a part's
_PLAIN = ("", "7bit", "8bit", "binary")  # Content-Transfer-Encodings that change nothing


class MultipartError(ValueError):
    """The body is not what its Content-Type says, or has not come whole."""


class Parts(Protocol):
    """Who takes the parts of a form, one after the other."""

    def begin(self, name: str, filename: str | None) -> None:
        """A part begins. filename: as the sender calls it, which may be anything."""
        ...

    def data(self, data: bytes) -> None:
        """Some of it."""
        ...

    def end(self) -> None:
        """That was all of it."""
        ...


class _State(Enum):
    FIRST = "the first boundary is due"
    BOUNDARY = "behind a boundary"
    HEADER = "in a part's header"
    BODY = "in a part"
    END = "behind the last boundary"


class MultipartReader:
    """Feed it the body in pieces of any size, and then `finish`. Both raise MultipartError, and what `parts` raises."""

    def __init__(self, content_type: str, parts: Parts) -> None:
        message = Message()
        message["Content-Type"] = content_type
        kind, boundary = message.get_content_type(), _parameter(message, "boundary", "Content-Type")
        if kind != "multipart/form-data":
            raise MultipartError("Content-Type must be multipart/form-data.")
        if boundary is None or not _BOUNDARY.fullmatch(boundary):
            raise MultipartError("Content-Type: multipart/form-data needs a boundary, of 1 to 70 of RFC 2046's signs.")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # so that the first boundary looks as the others do
        self._state = _State.FIRST
        self._parts = parts

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def finish(self) -> None:
        """The body has ended."""
        if self._state is not _State.END or bytes(self._buffer) not in (b"", b"\r\n"):
            raise MultipartError(f"the form is cut off: the body ended {self._state.value}.")

    def _step(self) -> bool:
        """Read one thing. False: it is not there yet."""
        if self._state is _State.FIRST:
            return self._read_first()
        if self._state is _State.BOUNDARY:
            return self._read_boundary()
        if self._state is _State.HEADER:
            return self._read_header()
        if self._state is _State.BODY:
            return self._read_body()
        if not b"\r\n".startswith(self._buffer):
            raise MultipartError("something stands behind the form's last boundary.")
        return False

    def _read_first(self) -> bool:
        if not self._buffer.startswith(self._delimiter[: len(self._buffer)]):
            raise MultipartError("the form does not begin with the boundary that Content-Type names.")
        if len(self._buffer) < len(self._delimiter):
            return False
        del self._buffer[: len(self._delimiter)]
        self._state = _State.BOUNDARY
        return True

    def _read_boundary(self) -> bool:
        if len(self._buffer) < 2:
            return False
        sign = bytes(self._buffer[:2])
        if sign not in (b"\r\n", b"--"):
            raise MultipartError("a boundary is not followed by a line's end.")
        del self._buffer[:2]
        self._state = _State.HEADER if sign == b"\r\n" else _State.END
        return True

    def _read_header(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, _LONGEST_HEADER)
        if end < 0:
            if len(self._buffer) >= _LONGEST_HEADER:
                raise MultipartError(f"a part's header has more than {_LONGEST_HEADER} bytes.")
            return False
        header = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        self._parts.begin(*_read_header(header))
        self._state = _State.BODY
        return True

    def _read_body(self) -> bool:
        found = self._buffer.find(self._delimiter)
        end = found if found >= 0 else len(self._buffer) - len(self._delimiter) + 1
        if end > 0:
            self._parts.data(bytes(self._buffer[:end]))
            del self._buffer[:end]
        if found < 0:
            return False
        del self._buffer[: len(self._delimiter)]
        self._parts.end()
        self._state = _State.BOUNDARY
        return True


def _parameter(message: Message, name: str, header: str = "Content-Disposition") -> str | None:
    """A header's parameter; None: it has none, or one that is written as RFC 2231 has it, which no sender does here."""
    try:
        found = message.get_param(name, header=header)
    except (ValueError, LookupError) as error:
        raise MultipartError(f"{header} cannot be read: {type(error).__name__}.") from None
    return found if isinstance(found, str) else None


def _read_header(header: bytes) -> tuple[str, str | None]:
    """A part's name and its file's."""
    try:
        message = HeaderParser().parsestr(header.decode())
        dispositions = message.get_all("Content-Disposition", [])
        encoding = str(message.get("Content-Transfer-Encoding", "")).strip().lower()
        name, filename = _parameter(message, "name"), message.get_filename()
        kind = message.get_content_disposition()
    except (ValueError, LookupError) as error:
        raise MultipartError(f"a part's header cannot be read: {type(error).__name__}.") from None
    if len(dispositions) != 1 or kind != "form-data" or not name:
        raise MultipartError("a part has no Content-Disposition: form-data with a name.")
    if encoding not in _PLAIN:
        raise MultipartError(f"a part has Content-Transfer-Encoding {encoding[:40]!r}: send it as it is.")
    return name, filename
