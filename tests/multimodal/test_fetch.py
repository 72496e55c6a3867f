"""URLs reach what the operator named, and nothing beside it."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal import fetch
from quire.multimodal.fetch import is_public, read_file, read_http

# Files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.png").write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "open" / "inside.png").symlink_to(tmp_path / "open" / "a.png")
    (tmp_path / "open" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "open" / "up").symlink_to(tmp_path)
    (tmp_path / "open" / "kernel.png").symlink_to(f"/proc/self/root{tmp_path}/open/a.png")
    (tmp_path / "open" / "number.png").symlink_to("/dev/fd/0")
    (tmp_path / "open" / "round").symlink_to(tmp_path / "open" / "round")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path / "open"


def test_files_of_the_folder(folder) -> None:
    config = MediaConfig(allowed_local_media_path=str(folder))
    for url in (f"file://{folder}/a.png", f"file://localhost{folder}/./a.png", f"file://{folder}/inside.png"):
        assert read_file(url, config) == b"picture"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/../secret.png", "not under"),
        ("/%2e%2e/secret.png", "not under"),
        ("/out.png", "not under"),
        ("/up/secret.png", "not under"),
        ("/kernel.png", "not under"),
        ("/number.png", "not under"),
        ("/round", "cannot be read"),
        ("/pipe", "no plain file"),
        ("", "no plain file|cannot be read"),
        ("/absent.png", "cannot be read"),
        ("/a%00.png", "cannot be read"),
    ],
)
def test_what_no_file_url_may_read(folder, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read_file(f"file://{folder}{path}", MediaConfig(allowed_local_media_path=str(folder)))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "start", ["/proc/self/root", "/proc/thread-self/root", "/proc/self/../1/root", "//proc/self/cwd"]
)
def test_the_kernels_links_lead_nowhere(folder, monkeypatch, start: str) -> None:
    """Their text says what lies there for one process; behind them is another's file system, or another's file."""
    monkeypatch.chdir("/")
    with pytest.raises(RequestError, match="not under"):
        read_file(f"file://localhost{start}{folder}/a.png", MediaConfig(allowed_local_media_path=str(folder)))
    with open(folder / "a.png") as file, pytest.raises(RequestError, match="not under"):
        read_file(f"file:///dev/fd/{file.fileno()}", MediaConfig(allowed_local_media_path=str(folder)))


def test_a_link_that_comes_late_is_not_followed(folder, monkeypatch) -> None:
    """Between the look at a path and its opening, a folder of it is replaced by a link."""
    (folder / "sub").mkdir()
    (folder / "sub" / "secret.png").write_bytes(b"picture")
    resolve = fetch.paths.resolve

    def slow(path):
        found = resolve(path)
        (folder / "sub").rename(folder / "gone")
        (folder / "sub").symlink_to(folder.parent)
        return found

    monkeypatch.setattr(fetch.paths, "resolve", slow)
    with pytest.raises(RequestError, match="cannot be read"):
        read_file(f"file://{folder}/sub/secret.png", MediaConfig(allowed_local_media_path=str(folder)))


def test_files_are_off_until_allowed_and_limited(folder) -> None:
    with pytest.raises(RequestError, match="are off"):
        read_file(f"file://{folder}/a.png", MediaConfig())
    with pytest.raises(RequestError, match="of this machine"):
        read_file(f"file://host{folder}/a.png", MediaConfig(allowed_local_media_path=str(folder)))
    config = MediaConfig(allowed_local_media_path=str(folder), max_image_bytes=6)
    with pytest.raises(RequestError, match="more than the 6 bytes"):
        read_file(f"file://{folder}/a.png", config)


# Hosts


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808"])
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://evil/a.png", "evil is not among"),
        ("http://allowed@evil/a.png", "user name"),
        ("http://allowed:x@allowed/a.png", "user name"),
        ("http://allowed\\@evil/a.png", "backslashes"),
        ("http://allowed /a.png", "spaces"),
        ("http://allowed/a\r\nHost: evil", "control"),
        ("http://allowed:81/a.png", "allowed:81 is not among"),
        ("http://allowed.evil/a.png", "not among"),
        ("http://evil#allowed/a.png", "evil is not among"),
        ("http://[::1/a.png", "parsed"),
        ("http://allowed:99999/", "parsed"),
        ("http:///a.png", "not an http"),
    ],
)
def test_hosts_that_are_not_allowed(url: str, message: str, monkeypatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("looked up"))
    with pytest.raises(RequestError, match=message):
        read_http(url, MediaConfig(allowed_media_domains=("allowed",)))
    with pytest.raises(RequestError, match="are off"):
        read_http(url, MediaConfig())


def resolving_to(*addresses: str) -> Callable[..., list]:
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    return lambda host, port, *_, **__: [(*stream, (address, port)) for address in addresses]


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("8.8.8.8", "10.0.0.1"), ("169.254.169.254",)])
def test_names_that_resolve_into_the_house(addresses, monkeypatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to(*addresses))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("connected"))
    with pytest.raises(RequestError, match="not public"):
        read_http("http://allowed/a.png", MediaConfig(allowed_media_domains=("Allowed",)))


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
            path = self.path.split("?")[0]
            if path == "/drip":
                self.send_response(200)
                self.end_headers()
                try:
                    for _ in range(2000):  # 100 seconds
                        self.wfile.write(b"x")
                        self.wfile.flush()
                        time.sleep(0.05)
                except OSError:
                    return
                return
            body = b"picture" if path != "/large" else b"x" * 5000
            status = {"/loop": 302, "/away": 302, "/file": 302, "/again": 301, "/absent": 404}.get(path, 200)
            self.send_response(status)
            targets = {"/loop": "/loop", "/away": "http://evil/", "/file": "file:///etc/passwd", "/again": "a.png"}
            if path in targets:
                self.send_header("Location", targets[path])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hosts = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def ask(server, monkeypatch) -> Callable[..., bytes]:
    """Read a path of the server, which for once counts as public."""
    monkeypatch.setattr(fetch, "is_public", lambda _: True)
    port = server.server_address[1]

    def read(path: str, **settings) -> bytes:
        config = MediaConfig(allowed_media_domains=(f"localhost:{port}",), **settings)
        return read_http(f"http://localhost:{port}{path}", config)

    monkeypatch.setattr(socket, "getaddrinfo", resolving_to("127.0.0.1"))
    return read


def test_a_picture_is_fetched(ask, server) -> None:
    assert ask("/a.png?size=3") == b"picture" and ask("/again") == b"picture"
    assert server.hosts == [f"localhost:{server.server_address[1]}"] * 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/loop", "redirects more than 3 times"),
        ("/away", "evil is not among"),
        ("/file", "not an http"),
        ("/absent", "status 404"),
        ("/large", "more than the 1,000 bytes"),
    ],
)
def test_what_is_not_fetched(ask, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(path, max_image_bytes=1000)


def taken_over(plain: socket.socket, host: str) -> socket.socket:
    timeout = plain.gettimeout()
    taken = socket.socket(fileno=plain.detach())
    taken.settimeout(timeout)
    return taken


@pytest.mark.parametrize("secure", [False, True])
def test_a_host_that_drips_is_cut_off(ask, secure: bool, monkeypatch) -> None:
    if secure:  # TLS takes the connection's descriptor over
        monkeypatch.setattr(fetch, "_secured", taken_over)
        parts = fetch.urlsplit
        monkeypatch.setattr(fetch, "urlsplit", lambda url: parts(url.replace("http:", "https:")))
    begin = time.monotonic()
    with pytest.raises(RequestError, match=r"more than 0.5 s"):
        ask("/drip", media_fetch_timeout=0.5)
    assert time.monotonic() - begin < 50


def test_a_host_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setattr(fetch, "is_public", lambda _: True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]  # nobody listens there, and nobody else may
        with pytest.raises(RequestError, match="cannot be read: ConnectionRefusedError"):
            read_http(f"http://127.0.0.1:{port}/", MediaConfig(allowed_media_domains=(f"127.0.0.1:{port}",)))
