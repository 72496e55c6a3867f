"""Bytes behind a URL: from a folder or from hosts that the operator has named, and from nowhere else.

A URL is the client's, and what it reaches must not be more than the operator meant: a link must not lead out of the
folder, and a name must not lead to this machine or its network (the cloud's metadata service, an admin page), be it
by resolving there, by a redirect, or by resolving otherwise the second time it is asked.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from quire import paths
from quire.config import MediaConfig
from quire.errors import RequestError

_PIECE = 1 << 16
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def read_file(url: str, config: MediaConfig, kind: str = "image") -> bytes:
    """The bytes of a file: URL under config.allowed_local_media_path. Raises RequestError."""
    if config.allowed_local_media_path is None:
        raise RequestError("file: URLs are off; allowed_local_media_path names a folder that they may read")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise RequestError("a file: URL must be of this machine, as in file:///folder/name.png")
    root = Path(config.allowed_local_media_path).resolve()
    try:
        # Resolved first: neither .. nor a link leads out of the folder.
        path = _resolved(unquote(parts.path))
        if path is None or not path.is_relative_to(root):
            raise RequestError("the file is not under allowed_local_media_path")
        with open(paths.open_beneath(path, root), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError("it is no plain file")
            data = file.read(config.most_bytes(kind) + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the file cannot be read: {getattr(error, 'strerror', None) or 'bad path'}") from None
    check_length(len(data), config, kind)
    return data


def _resolved(path: str) -> Path | None:
    """None: it leads through the kernel's own links, and is nowhere."""
    try:
        return paths.resolve(path)
    except paths.KernelPathError:
        return None


def host_of(url: str) -> str | None:
    """The host that a URL names, for counting; None: none, or it is none that would be asked."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def read_http(url: str, config: MediaConfig, check: Callable[[], object] = lambda: None, kind: str = "image") -> bytes:
    """The bytes behind an http: or https: URL of config.allowed_media_domains, redirects included.

    All of it together takes at most config.media_fetch_timeout seconds (but for resolving names, where the system's
    own limit holds). check: called again and again; what it raises ends the reading. Raises RequestError.
    """
    deadline = time.monotonic() + config.media_fetch_timeout
    for _ in range(_MOST_REDIRECTS + 1):
        parts = _checked(url, config)
        try:
            answer = _get(parts, deadline, config, check, kind)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            late = time.monotonic() >= deadline
            reason = f"it took more than {config.media_fetch_timeout:g} s" if late else type(error).__name__
            raise RequestError(f"the URL cannot be read: {reason}") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise RequestError(f"the URL redirects more than {_MOST_REDIRECTS} times")


def _checked(url: str, config: MediaConfig) -> SplitResult:
    """The URL's parts, if its host is one of those allowed. Nobody else's reading of it counts: parts are used."""
    if not config.allowed_media_domains:
        raise RequestError("http: and https: URLs are off; allowed_media_domains names the hosts that may be asked")
    if any(ord(c) <= 32 or ord(c) == 127 or c == "\\" for c in url):
        raise RequestError("the URL has spaces, control characters or backslashes")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RequestError("the URL cannot be parsed") from None
    if parts.scheme not in _PORTS or not host:
        raise RequestError("the URL, or one that it redirects to, is not an http: or https: one")
    if parts.username is not None or parts.password is not None:
        raise RequestError("the URL has a user name or a password in it")
    usual = port is None or port == _PORTS[parts.scheme]
    if (host if usual else f"{host}:{port}") not in {domain.lower() for domain in config.allowed_media_domains}:
        raise RequestError(f"{host}{'' if usual else f':{port}'} is not among allowed_media_domains")
    return parts


def _get(
    parts: SplitResult, deadline: float, config: MediaConfig, check: Callable[[], object], kind: str
) -> bytes | str:
    """The body, or where it redirects to."""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    plain = socket.create_connection((_public_address(host, port), port), timeout=_left(deadline))
    connection = http.client.HTTPConnection(host, port)
    # Data that drips in would start every timeout anew: at the deadline the connection is cut from outside. By another
    # descriptor, since TLS takes this one away.
    line = plain.dup()
    timer = threading.Timer(_left(deadline), _cut, (line,))
    timer.daemon = True
    timer.start()
    try:
        secure = parts.scheme == "https"
        connection.sock = _secured(plain, host) if secure else plain
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "quire", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if response.status in _REDIRECTS and response.headers.get("Location"):
            return str(response.headers["Location"])
        if response.status != 200:
            raise RequestError(f"the host answered with status {response.status}")
        data = bytearray()
        while piece := response.read(_PIECE):
            check()
            data += piece
            check_length(len(data), config, kind)
        if time.monotonic() >= deadline:  # cut, which looks like the end of the body
            raise TimeoutError
        return bytes(data)
    finally:
        timer.cancel()
        connection.close()
        plain.close()
        line.close()


def _secured(plain: socket.socket, host: str) -> ssl.SSLSocket:
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _public_address(host: str, port: int) -> str:
    """An address of the host, which is what is connected to: it is not resolved again."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(is_public(ipaddress.ip_address(text.split("%")[0])) for text in found):
        raise RequestError(f"{host} resolves to an address that is not public")
    return found[0]


def is_public(address: Address) -> bool:
    """Whether an address is of the open internet, and so are the addresses that it may stand for."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inner: list[Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(is_public(part) for part in inner if part is not None)


def check_length(count: int, config: MediaConfig, kind: str = "image") -> None:
    """Raises RequestError for a file of more bytes than one of its kind may have."""
    if count > config.most_bytes(kind):
        smaller = "scale it down" if kind == "image" else "cut it, save it smaller"
        raise RequestError(
            f"it has more than the {config.most_bytes(kind):,} bytes that are allowed: {smaller}, or raise "
            f"max_{kind}_bytes"
        )
