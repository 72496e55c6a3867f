"""Hostile clients for `soak.py`: each is one small thing that once hurt a server, done once.

All of it goes to the server under test, on the loopback interface, and every attack ends by itself within seconds.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from PIL import Image

Attack = Callable[[str, int], Awaitable[int]]  # (host, port) -> the answer's status; 0: none came

_PATIENCE = 20.0  # seconds that an attack waits for its answer
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


async def _exchange(host: str, port: int, *pieces: bytes, linger: float = 0.0) -> int:
    """Send the pieces, read the answer's status, stay silent for `linger` seconds, and leave."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), _PATIENCE)
        await asyncio.sleep(linger)
        return int(line.split()[1]) if line.startswith(b"HTTP/") else 0
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return 0  # it was closed on: that is an answer too
    finally:
        writer.close()


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: soak", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def _json(path: str, data: Mapping[str, Any]) -> Attack:
    async def send(host: str, port: int) -> int:
        return await _exchange(host, port, _post(path, json.dumps(data).encode()))

    return send


async def stray_line(host: str, port: int) -> int:
    """A line break behind an answer, and silence: the connection must end all the same."""
    return await _exchange(host, port, b"GET /health HTTP/1.1\r\nHost: soak\r\n\r\n", b"\r\n", linger=5.0)


async def half_a_body(host: str, port: int) -> int:
    """An answer comes early, and the body never."""
    head = _post("/nowhere", b"x" * 100).replace(b"Content-Length: 100", b"Content-Length: 100000")
    return await _exchange(host, port, head, linger=5.0)


async def trailers(host: str, port: int) -> int:
    """Trailers of a megabyte."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    return await _exchange(host, port, head, *[b"a:b\r\n" * 4096] * 50, b"\r\n")


async def nested(host: str, port: int) -> int:
    """Four million empty lists."""
    return await _exchange(host, port, _post(_COMPLETIONS, b'{"prompt":[' + b"[]," * (1 << 22) + b"[]]}"))


async def upgrade(host: str, port: int) -> int:
    """HTTP/2 is asked for, by a request that has a body; HTTP/1.1 answers it."""
    body = json.dumps({"prompt": "A drum", "max_tokens": 2}).encode()
    wanted = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    return await _exchange(host, port, _post(_COMPLETIONS, body, *wanted))


def _with_image(url: str, **more: Any) -> Attack:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    return _json(_CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more})


def _url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _picture(kind: str, size: int, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(out, kind, **options)
    return out.getvalue()


def scans(size: int = 7000, count: int = 900) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = _picture("JPEG", size, progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * count + whole[-2:]


def all_attacks() -> dict[str, Attack]:
    """name -> attack."""
    small = _url(_picture("PNG", 40), "png")
    text = {"prompt": "A drum", "max_tokens": 8}
    masks = {"n": 63, "temperature": 1.0, "seed": 1, **text}
    return {
        "stray line": stray_line,
        "half a body": half_a_body,
        "trailers": trailers,
        "nested lists": nested,
        "h2c": upgrade,
        "scans": _with_image(_url(scans(), "jpeg")),
        "processor size": _with_image(small, mm_processor_kwargs={"size": {"height": 7071, "width": 7071}}),
        "processor std": _with_image(small, mm_processor_kwargs={"image_std": [1e-30] * 3}),
        "broken image": _with_image(_url(_picture("PNG", 40)[:60], "png")),
        "allowed tokens": _json(_COMPLETIONS, {**masks, "allowed_token_ids": [5, 6, 7] * 100_000}),
        "bad words": _json(_COMPLETIONS, {**masks, "bad_words": [f"word {number}" for number in range(1024)]}),
        "weights": _json(
            "/v1/load_lora_adapter",
            {"lora_name": "inf", "adapters": [{"name": name, "weight": 1e308} for name in ("french", "shout")]},
        ),
        "path": _json(
            "/v1/load_lora_adapter", {"lora_name": "root", "lora_path": "/proc/self/cwd/../../../../../../etc"}
        ),
    }
