"""A server of GET /v1/engine/events that says what a test wants, and states of an engine as the schema has them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def state(**given: Any) -> dict[str, Any]:
    """An engine with 64 blocks, three requests and two adapters; fields may be given otherwise."""
    requests = [
        {"number": 2, "state": "running", "adapter": None, "blocks": 12},
        {"number": 3, "state": "running", "adapter": "french", "blocks": 12},
        {"number": 4, "state": "waiting", "adapter": "shout", "blocks": 0},
    ]
    counts = {"prompt_tokens": 96, "cached_tokens": 32, "computed_tokens": 100, "output_tokens": 5, "seconds": 1.5}
    return {
        "time": 61.5,
        "sleeping": False,
        "engine": {
            "model": "quire-demo",
            "dtype": "bfloat16",
            "device": "cpu",
            "version": "0.9.1",
            "max_num_seqs": 32,
            "max_batched_tokens": 512,
        },
        "pools": [
            {
                "name": "kv",
                "block_size": 8,
                "total": 64,
                "free": 32,
                "cached": 8,
                "owned": 24,
                "swapped": 0,
                "map": [[4, 2, 2], [8, 2, 1], [8, 1, 0], [12, 3, 1], [32, 0, 0]],
            }
        ],
        "requests": [{**one, **counts} for one in requests],
        "more_requests": 0,
        "steps": [
            {
                "time": 61.0 + i,
                "milliseconds": 4.0 + i,
                "prefill_tokens": 64 * i,
                "decode_tokens": 2,
                "sequences": 2,
                "media": i,
                "adapters": 1,
            }
            for i in range(2)
        ],
        "adapters": [
            {"name": "french", "tier": "device", "bytes": 1_200_000, "rank": 8, "requests": 1, "pinned": True},
            {"name": "shout", "tier": "disk", "bytes": None, "rank": None, "requests": 1, "pinned": False},
        ],
        "more_adapters": 0,
        "rates": {
            "prompt_tokens_per_second": 120.5,
            "output_tokens_per_second": 33.25,
            "requests_per_second": 1.5,
            "cache_hit_rate": 0.25,
        },
        **given,
    }


def event(value: Any) -> bytes:
    return b"event: state\ndata: " + json.dumps(value).encode() + b"\n\n"


class Asked:
    """A request of a client's, and what it is answered."""

    def __init__(self, handler: BaseHTTPRequestHandler, ends: threading.Event) -> None:
        self._handler = handler
        self.ends = ends
        self.path = handler.path
        self.key = handler.headers.get("Authorization")

    def begin(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        self._handler.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self._handler.send_header(name, value)
        self._handler.end_headers()

    def send(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def stay(self) -> None:
        """Say nothing more until the server ends, but for what keeps a connection alive."""
        while not self.ends.wait(0.5):
            self.send(b": still here\n\n")


@contextmanager
def answering(answer: Callable[[Asked], None], port: int = 0) -> Iterator[str]:
    """A server's address; answer: called in a thread for each request."""
    ends = threading.Event()

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # who asked has gone
                answer(Asked(self, ends))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ends.set()
        server.shutdown()
        server.server_close()
        thread.join()


def telling(*values: Any) -> Callable[[Asked], None]:
    """Answers with these states, the last one twice, and stays."""

    def answer(asked: Asked) -> None:
        asked.begin()
        for value in [*values, *values[-1:]]:
            asked.send(event(value))
        asked.stay()

    return answer
