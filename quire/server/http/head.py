"""A request's head: read strictly by h11, and by rules of which proxies and servers are known to differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import h11

from quire.server.http.plain import read_plain

MOST_HEAD = 64 << 10  # bytes of request line and header
MOST_FIELDS = 128  # lines of a header
MOST_FRAMING = 16 << 10  # bytes of a chunk's size line, and of trailers

_END = b"\r\n\r\n"
_LONE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\x00")  # what some readers take for a line's end, and some do not
_FOLD = re.compile(rb"\r\n[ \t]")
_LENGTHS = re.compile(rb"\r\ncontent-length:([^\r]*)", re.IGNORECASE)  # h11 takes equal ones together
_URL = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)


class BadRequestError(Exception):
    """A request that is not served; the connection ends, as nobody knows where the next would begin."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Head:
    """A request without its body. text: as it came. machine: h11's, which has read it; None: it was plain. path:
    decoded; raw_path: as it came.
    """

    text: bytes
    machine: h11.Connection | None
    method: str
    raw_path: bytes
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    version: str
    has_body: bool
    length: int | None  # of the body; None: in chunks

    def scope(self, secure: bool, server: Any, client: Any) -> dict[str, Any]:
        """What ASGI calls the connection's scope."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.version,
            "method": self.method,
            "scheme": "https" if secure else "http",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "server": server,
            "client": client,
            "state": {},
        }


def take_head(incoming: bytearray, seen: int) -> bytes | None:
    """Cut the first head off what has come; None while it is not whole. Raises BadRequestError.

    seen: bytes of it that were looked at before, so that a header which comes in drops costs no more than another.
    """
    if seen <= 2 and incoming[:2] == b"\r\n":  # an old client's line after a body; one is forgiven
        del incoming[:2]
        seen = 0
    start = max(0, seen - len(_END))
    end = incoming.find(_END, start, MOST_HEAD)
    if end < 0 and len(incoming) >= MOST_HEAD:
        raise BadRequestError(431, f"the header has more than {MOST_HEAD} bytes, which is the limit.")
    if incoming.startswith((b"\r", b"\n")) and len(incoming) > 1:
        raise BadRequestError(400, "a request begins with its method.")
    # The last byte may be the first half of a line's end.
    stop = end + len(_END) if end >= 0 else len(incoming) - (incoming[-1:] == b"\r")
    _check_lines(incoming, start, stop)
    if end < 0:
        return None
    head = bytes(incoming[:stop])
    del incoming[:stop]
    return head


def _check_lines(head: bytearray, start: int, stop: int) -> None:
    if _LONE.search(head, start, stop) is not None:
        raise BadRequestError(400, "lines of a header end with CR and LF, and hold neither of them, nor NUL.")
    if head.count(b"\n", 0, stop) > MOST_FIELDS + 2:
        raise BadRequestError(431, f"the header has more than {MOST_FIELDS} lines, which is the limit.")
    if _FOLD.search(head, start, stop) is not None:
        raise BadRequestError(400, "a line of a header goes on in the next, which is not taken any more.")


def read_head(head: bytes) -> Head:
    """Raises BadRequestError. What it says quotes nothing of the request: a header may hold a key."""
    plain = read_plain(head)
    if plain is not None:
        method, target, headers, length = plain
        return _head(head, None, method, target, headers, "1.1", length)
    machine = new_machine(head)
    try:
        request = machine.next_event()
    except h11.RemoteProtocolError as error:
        status = error.error_status_hint
        if status == 501:
            raise BadRequestError(501, "of transfer codings chunked alone is read.") from None
        raise BadRequestError(400, "the request line or a line of the header is malformed.") from None
    if not isinstance(request, h11.Request):
        raise BadRequestError(400, "the request line is malformed.")
    version = request.http_version.decode()
    if version not in ("1.0", "1.1"):
        raise BadRequestError(505, "of HTTP, versions 1.0 and 1.1 are spoken here.")
    headers = [(bytes(name), bytes(value)) for name, value in request.headers]
    whole = _length(_LENGTHS.findall(head), headers, version)
    expected = [value for name, value in headers if name == b"expect"]
    if any(value.lower() != b"100-continue" for value in expected):
        raise BadRequestError(417, "the header expects something else than 100-continue.")
    return _head(head, machine, request.method, bytes(request.target), headers, version, whole)


def new_machine(head: bytes) -> h11.Connection:
    """h11's, that has a head before it."""
    machine = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_FRAMING)
    machine.receive_data(head)
    return machine


def _head(
    text: bytes,
    machine: h11.Connection | None,
    method: bytes,
    target: bytes,
    headers: list[tuple[bytes, bytes]],
    version: str,
    length: int | None,
) -> Head:
    raw_path, query = _target(method, target)
    path = unquote(raw_path.decode("ascii"))
    return Head(text, machine, method.decode("ascii"), raw_path, path, query, headers, version, length != 0, length)


def _length(lengths: list[bytes], headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Of the body; None for chunks. Two answers to that question are what smuggles requests past a proxy."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1 or any(b"," in length for length in lengths):
        raise BadRequestError(400, "the body's length is given twice, by Content-Length or Transfer-Encoding.")
    if codings and version == "1.0":
        raise BadRequestError(400, "HTTP/1.0 has no Transfer-Encoding.")
    return None if codings else int(lengths[0]) if lengths else 0


def _target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """(path, query) of a request's target, in any of its forms but CONNECT's."""
    if (whole := _URL.match(target)) is not None:  # as a proxy is asked
        target = target[whole.end() :]
        target = target if target.startswith(b"/") else b"/" + target
    if not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        raise BadRequestError(400, "a request's target is a path, or a URL with one.")
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return path, query
