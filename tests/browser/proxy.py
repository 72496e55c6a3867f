"""A reverse proxy as people put one before a server: it serves under a path, which it takes away."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class PathProxy:
    """http://127.0.0.1:PORT/PREFIX/x is answered by UPSTREAM/x; other paths with 404. Use as a context manager.

    A connection carries one request: its head is changed, then bytes go both ways as they come.
    """

    def __init__(self, upstream: str, prefix: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname or "", address.port or 80)
        self._prefix = prefix.rstrip("/")
        self.outside: list[str] = []  # paths that were asked for and are not under the prefix

    def __enter__(self) -> PathProxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}{self._prefix}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            head, rest = self._head(client)
            match = re.match(rb"(\w+) (\S+) ", head)
            if match is None:  # a connection that the browser opened in advance
                return
            path = match[2].decode()
            if not path.startswith(f"{self._prefix}/"):
                self.outside.append(path)
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            within = path.removeprefix(self._prefix).encode()
            head = re.sub(rb"(?im)^connection:[^\n]*\n", b"", head[: match.start(2)] + within + head[match.end(2) :])
            head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            with socket.create_connection(self._upstream) as server:
                server.sendall(head + rest)
                onward = threading.Thread(target=_pump, args=(client, server), daemon=True)
                onward.start()
                _pump(server, client)
                onward.join(60)

    def _head(self, client: socket.socket) -> tuple[bytes, bytes]:
        """The request's head with its empty line, and what came of its body; empty if the client leaves before."""
        read = b""
        while b"\r\n\r\n" not in read:
            part = client.recv(65536)
            if not part:
                return b"", b""
            read += part
        head, _, rest = read.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n", rest


def _pump(source: socket.socket, target: socket.socket) -> None:
    """All bytes of one socket to another; the end of the one ends both, so that who stops reading stops the answer."""
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
