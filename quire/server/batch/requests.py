"""Lines of a batch in OpenAI's format, read one by one: {"custom_id", "method": "POST", "url", "body"}."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from pydantic_core import from_json

from quire.errors import QuireError

_POOLED = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", *_POOLED)
_KEYS = ("custom_id", "method", "url", "body")
_WHOLE = {
    "stream": "answers of a batch come whole",
    "background": "nobody could ask for the answer later",
}  # fields of bodies that a batch has no use for
REQUEST_ID = re.compile(r"batch-[0-9a-f]{32}")

_BESIDE = 64 << 10  # bytes of a line around its body
_BOM = b"\xef\xbb\xbf"
_DIGEST = 16  # bytes


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line. body: JSON. id: of its answer; the same for the same line, and another where the line differs."""

    custom_id: str
    url: str
    body: bytes
    id: str


def name_digest(custom_id: str) -> bytes:
    """16 bytes that stand for a custom_id."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


def lines(file: BinaryIO, most: int | None) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each that is not blank. most: bytes of a body. Raises QuireError for a longer line."""
    limit = -1 if most is None else most + _BESIDE
    number = 0
    while line := file.readline(limit):
        number += 1
        if most is not None and len(line) == limit and not line.endswith(b"\n"):
            raise QuireError(
                f"line {number} has more than {limit} bytes; a body may have {most} (--max-request-bytes)."
            )
        line = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if line:
            yield number, line


def read_object(line: bytes) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError, which says why it is none."""
    given = from_json(line, allow_inf_nan=False, cache_strings=False)
    if not isinstance(given, dict):
        raise ValueError("is no JSON object")
    return given


def read_request(line: bytes) -> BatchRequest:
    """A line of a batch. What its body says is the route's to check. Raises ValueError, which says what is wrong."""
    given = read_object(line)
    missing = next((key for key in _KEYS if key not in given), None)
    if missing is not None:
        raise ValueError(f"has no {missing}")
    unknown = next((key for key in given if key not in _KEYS), None)
    if unknown is not None:
        raise ValueError(f"has {unknown[:64]!r}: there is no such key in a batch")
    custom_id, method, url, body = (given[key] for key in _KEYS)
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text, and not empty")
    if method != "POST":
        raise ValueError("method must be POST")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    asked = next((name for name in _WHOLE if body.get(name)), None)
    if asked is not None:
        raise ValueError(f"body.{asked}: {_WHOLE[asked]}: take it out")
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    digest = blake2b(b"\n".join([name_digest(custom_id), url.encode(), text]), digest_size=_DIGEST)
    return BatchRequest(custom_id, url, text, f"batch-{digest.hexdigest()}")
