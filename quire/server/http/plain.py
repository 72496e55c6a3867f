"""Heads as nearly all clients and routes write them, read and written without h11, which takes ten times as long.

What is read here is a part of what h11 takes, in which there is nothing to decide: each line by itself says what it
means, and none is about the connection or the body but for one length. Every other head is h11's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

_REQUEST_LINE = re.compile(rb"(GET|POST) (/[!-~]*) HTTP/1\.1")
_FIELD = re.compile(rb"([0-9A-Za-z-]+): ?([!-~](?:[ -~]*[!-~])?)")
_LENGTH = re.compile(rb"[0-9]{1,18}")
# About the connection, or how a body is sent.
_OTHERS = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer", b"http2-settings"})
_OF_ANSWERS = frozenset({b"connection", b"transfer-encoding", b"upgrade"})
_BODYLESS = frozenset({204, 304})
_STATUS_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus if one >= 200}
_CHUNKED = b"Transfer-Encoding: chunked\r\n"

Fields = list[tuple[bytes, bytes]]


def read_plain(head: bytes) -> tuple[bytes, bytes, Fields, int] | None:
    """(method, target, fields by lower-case names, length of the body) of a plain head with its last empty line."""
    first, *lines = head[:-4].split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        return None
    fields: Fields = []
    hosts, length = 0, None
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        name, value = field[1].lower(), field[2]
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            if length is not None or _LENGTH.fullmatch(value) is None:
                return None
            length = int(value)
        elif name in _OTHERS or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        fields.append((name, value))
    return (found[1], found[2], fields, length or 0) if hosts == 1 else None


def plain_answer(status: int, fields: Sequence[tuple[bytes, bytes]], names: Iterable[bytes]) -> bytes | None:
    """An answer's head, as h11 would write it to who keeps the connection; None: that is for h11 to do.

    names: the fields', in lower case. Without a length the body comes in chunks.
    """
    begin, known = _STATUS_LINES.get(status), list(names)
    if begin is None or status in _BODYLESS or not _OF_ANSWERS.isdisjoint(known):
        return None
    lengths = known.count(b"content-length")
    if lengths > 1:
        return None
    lines = [begin]
    for (name, value), lower in zip(fields, known, strict=True):
        line = b"%b: %b" % (name, value)
        if _FIELD.fullmatch(line) is None or (lower == b"content-length" and _LENGTH.fullmatch(value) is None):
            return None
        lines += (line, b"\r\n")
    return b"".join([*lines, b"" if lengths else _CHUNKED, b"\r\n"])
