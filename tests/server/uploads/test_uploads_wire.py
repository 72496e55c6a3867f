"""Uploads as they come on the wire: cut off, slow, lying about their length, without a key. Nothing is left of them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.api_server import LocalServer
from tests.server.uploads.helpers import (
    ADAPTERS,
    BOUNDARY,
    CHAT,
    MOST,
    WHO,
    files_of,
    form,
    names_of,
    send,
    stored,
    upload,
    zipped,
)
from tests.server.wire import message, until_closed

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = files_of("french")
FORM = form("mine", FILES)
KIND = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
KEY, ADMIN = "a-key", "an-admin-key"


def connect(server: LocalServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    client = socket.create_connection((host, int(port)), timeout=30)
    return client


def asked(server: LocalServer, *lines: str, body: bytes, end: bool = False) -> bytes:
    """What comes back for these bytes. end: nothing more is sent, and the server learns it."""
    with connect(server) as client:
        client.sendall(message("POST", ADAPTERS, KIND, *lines, body=body))
        if end:
            client.shutdown(socket.SHUT_WR)
        return until_closed(client)


def until_nothing_is_stored(server: LocalServer) -> None:
    end = time.monotonic() + 20
    while stored(server):
        assert time.monotonic() < end, stored(server)
        time.sleep(0.01)


@pytest.mark.parametrize("length", [0, 1, 60, 200, 2000, len(FORM) - 70, len(FORM) - 2, len(FORM) - 1])
def test_a_client_that_leaves_in_the_middle_leaves_nothing(http: Any, server: LocalServer, length: int) -> None:
    for lines in ([f"Content-Length: {len(FORM)}"], ["Transfer-Encoding: chunked"]):
        sent = FORM[:length] if "Length" in lines[0] else f"{length:x}\r\n".encode() + FORM[:length]
        with connect(server) as client:
            client.sendall(message("POST", ADAPTERS, KIND, *lines, body=sent if length else b""))
        until_nothing_is_stored(server)
        asked(server, *lines, body=sent if length else b"", end=True)
        until_nothing_is_stored(server)
    assert names_of(http) == []


@pytest.mark.parametrize("length", [0, 1, 60, 200, 2000, len(FORM) - 70, len(FORM) - 4, len(FORM) - 3])
def test_a_form_that_ends_too_early_is_refused(http: Any, server: LocalServer, length: int) -> None:
    """Its length is that of what came; the form itself has no end."""
    answer = send(http, FORM[:length])
    assert answer.status_code == 400 and "cut off" in answer.json()["error"]["message"]
    assert stored(server) == []


def test_a_form_without_its_last_line_end_is_taken(http: Any) -> None:
    assert send(http, FORM[:-2]).status_code == 200


def test_a_length_that_lies_is_no_way_in(http: Any, server: LocalServer) -> None:
    close = "Connection: close"
    short = asked(server, f"Content-Length: {len(FORM) - 300}", close, body=FORM)
    assert short.startswith(b"HTTP/1.1 400 ")
    huge = asked(server, f"Content-Length: {10**15}", close, body=b"")
    assert huge.startswith(b"HTTP/1.1 413 ") and b"--max-adapter-upload-bytes" in huge
    longer = asked(server, "Content-Length: " + "9" * 400, close, body=b"")
    assert longer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    both = asked(server, f"Content-Length: {len(FORM)}", "Transfer-Encoding: chunked", close, body=FORM)
    assert both.startswith(b"HTTP/1.1 400 ")
    assert stored(server) == [] and names_of(http) == []


def test_chunks_beyond_the_limit_are_given_up(http: Any, server: LocalServer) -> None:
    """No length said how many there would be."""
    weights = bytes(MOST + (1 << 20) + 50_000)  # a MiB is for the form
    big = form("mine", {"adapter_config.json": FILES["adapter_config.json"], "adapter_model.safetensors": weights})
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces(big, 50_000)) + b"0\r\n\r\n"
    answer = asked(server, "Transfer-Encoding: chunked", "Connection: close", body=chunks)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert stored(server) == [] and names_of(http) == []


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_of_any_size_are_taken(http: Any, server: LocalServer, size: int) -> None:
    body = form("mine", {"a.zip": zipped(FILES)}) if size > 1 else form("x" * 257, {"README.md": b"x" * 2000})
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces(body, size)) + b"0\r\n\r\n"
    answer = asked(server, "Transfer-Encoding: chunked", "Connection: close", body=chunks)
    assert answer.startswith(b"HTTP/1.1 200 " if size > 1 else b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "kind",
    [
        "", "text/plain", "application/json", "multipart/form-data", "multipart/form-data; boundary=",
        "multipart/mixed; boundary=a-boundary", "multipart/form-data; boundary=other", "a" * 4000,
        "multipart/form-data; boundary=" + "a" * 71, 'multipart/form-data; boundary="a b"',
        "multipart/form-data; boundary*0=a; boundary*1=b", "multipart/form-data; boundary*=nosuch''%ff",
        "multipart/form-data; boundary=a-boundary\x01", "multipart/form-data; b\xe4=1",
    ],
)  # fmt: skip
def test_other_content_types_are_refused(http: Any, server: LocalServer, kind: str) -> None:
    answer = http.post(ADAPTERS, content=FORM, headers={"Content-Type": kind.encode("latin-1")})
    assert answer.status_code == 400, kind
    assert stored(server) == []


@pytest.mark.parametrize(
    "head",
    [
        "", "Content-Disposition: form-data", "Content-Disposition: attachment; name=lora_name", "Content-Disposition: "
        'form-data; name=""', "Content-Disposition: form-data; name*=utf-8''lora_name", "X: y", "no header at all",
        "Content-Disposition: form-data; name=lora_name\r\nContent-Disposition: form-data; name=files",
        "Content-Disposition: form-data; name=lora_name\r\nContent-Transfer-Encoding: base64",
        "Content-Disposition: form-data; name=lora_name\r\nContent-Transfer-Encoding: quoted-printable",
        "Content-Disposition: form-data; name=lora_name\r\nX: " + "y" * 9000,
        "Content-Disposition: form-data; name=files; filename*0=adapter_; filename*1=model.bin",
        "Content-Disposition: form-data; name=files; filename*=utf-8''..%2fadapter_config.json",
        "Content-Disposition: form-data; name=files; filename*=nosuch''x",
        "Content-Disposition: form-data; name=files; filename=",
    ],
)  # fmt: skip
def test_other_parts_are_refused(http: Any, server: LocalServer, head: str) -> None:
    begin = FORM.removesuffix(f"--{BOUNDARY}--\r\n".encode())
    body = begin + f"--{BOUNDARY}\r\n{head}\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode()
    assert send(http, body).status_code == 400
    assert stored(server) == []


@pytest.mark.parametrize("more", [b"x", b"\r\n\r\n", b"--a-boundary--\r\n", b"\r\n" + FORM])
def test_nothing_may_stand_around_the_form(http: Any, server: LocalServer, more: bytes) -> None:
    assert send(http, FORM + more).status_code == 400
    assert send(http, more + FORM).status_code == 400
    assert stored(server) == []


def test_a_file_may_have_anything_in_it(http: Any, server: LocalServer) -> None:
    """What nearly is a boundary is none; a boundary with something behind it is an error, not a guess."""
    near = b"".join(b"\r\n--a-boundar" + bytes([byte]) for byte in range(256) if byte != ord("y"))
    archive = zipped({**FILES, "README.md": near * 100}, 0)
    upload(http, "mine", {"a.zip": archive})
    assert send(http, form("other", {**FILES, "README.md": b"\r\n--a-boundaryx"})).status_code == 400


# -- time and numbers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hasty() -> Iterator[LocalServer]:
    """A body has a second, and an upload that for each MiB."""
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, body_timeout=1.0) as server:
        yield server


def test_an_upload_that_stops_is_ended(hasty: LocalServer) -> None:
    for length in (0, 100, len(FORM) - 1):
        answer = asked(hasty, f"Content-Length: {len(FORM)}", body=FORM[:length])
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        until_nothing_is_stored(hasty)


def test_an_upload_that_trickles_is_ended(hasty: LocalServer) -> None:
    with connect(hasty) as client:
        client.sendall(message("POST", ADAPTERS, KIND, "Content-Length: 1000000", body=FORM[:200]))
        client.settimeout(0.05)
        answer, begun = b"", time.monotonic()
        while not answer:
            assert time.monotonic() - begun < 20, "it is still open"
            try:
                client.sendall(b"x")
                answer = client.recv(1000)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")
    until_nothing_is_stored(hasty)


def test_four_are_taken_at_once(http: Any, server: LocalServer) -> None:
    waiting = [connect(server) for _ in range(4)]
    try:
        for client in waiting:
            client.sendall(message("POST", ADAPTERS, KIND, f"Content-Length: {len(FORM)}", body=FORM[:1000]))
        end = time.monotonic() + 20
        while len(stored(server)) < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        answer = send(http, FORM)
        assert answer.status_code == 429 and answer.headers["Retry-After"] == "5"
    finally:
        for client in waiting:
            client.close()
    until_nothing_is_stored(server)
    assert send(http, FORM).status_code == 200


# -- who may ---------------------------------------------------------------------------------------------------------


def test_who_has_no_key_sends_nothing() -> None:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    options: dict[str, Any] = {"api_keys": (KEY,), "admin_api_key": ADMIN, "allow_runtime_lora": True}
    with LocalServer(engine, **options) as server, server.http() as http:
        for key, status in ((None, 401), ("wrong", 401), (KEY, 403), (ADMIN, 200)):
            sent = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = send(http, FORM, **sent)
            assert answer.status_code == status, answer.text
            assert bool(stored(server)) == (status == 200)
            assert http.delete(f"{ADAPTERS}/nothing", headers=sent).status_code == (404 if status == 200 else status)
        # It is refused while the body has not come: nobody waits for it.
        answered = asked(server, f"Content-Length: {len(FORM)}", body=b"")
        assert answered.startswith(b"HTTP/1.1 401 ")
        assert names_of_with(http, KEY) == ["mine"]


def names_of_with(http: Any, key: str) -> list[str]:
    answer = http.get(ADAPTERS, headers={"Authorization": f"Bearer {key}"})
    return [one["name"] for one in answer.json()["data"]]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200), ({"Origin": "HERE"}, 200), ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200), ({"Sec-Fetch-Site": "cross-site", "Origin": "https://a.example"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://b.example"}, 403), ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 403),
        ({"Origin": "https://b.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Origin": "HERE.b.example"}, 403), ({"Origin": ""}, 403),
    ],
)  # fmt: skip
def test_a_web_page_of_another_site_changes_nothing(
    open_to_one: LocalServer, headers: dict[str, str], status: int
) -> None:
    """A form is sent without asking the server first, to a server on the visitor's own machine, too."""
    sent = {name: value.replace("HERE", open_to_one.url) for name, value in headers.items()}
    with open_to_one.http() as http:
        answer = send(http, FORM, **sent)
        assert answer.status_code == status, answer.text
        assert bool(stored(open_to_one)) == (status == 200)
        if status == 200:
            assert http.delete(f"{ADAPTERS}/mine").status_code == 200


@pytest.fixture(scope="module")
def open_to_one() -> Iterator[LocalServer]:
    """Without keys; a page of one other site may use it."""
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, allowed_origins=("https://a.example",)) as server:
        yield server


def test_without_the_flag_nothing_is_taken() -> None:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    with LocalServer(engine) as server, server.http() as http:
        answer = send(http, FORM)
        assert answer.status_code == 403 and "--allow-runtime-lora" in answer.text
        assert http.delete(f"{ADAPTERS}/mine").status_code == 403
        listed = http.get(ADAPTERS).json()
        assert listed["runtime_changes"] is False and listed["uploads"]["max_bytes"] == 0
        assert asked(server, f"Content-Length: {len(FORM)}", body=b"").startswith(b"HTTP/1.1 403 ")


def test_without_adapters_there_is_no_use_for_them(plain_model: Any) -> None:
    with LocalServer({"model": str(plain_model)}, allow_runtime_lora=True) as server, server.http() as http:
        answer = send(http, FORM)
        assert answer.status_code == 400 and "--enable-lora" in answer.text
        assert http.get(ADAPTERS).json() == {
            "object": "list", "data": [], "mixtures": [], "runtime_changes": False,
            "uploads": {"max_bytes": 0, "stored_bytes": 0, "store_bytes": 0},
        }  # fmt: skip


# -- beside other requests ---------------------------------------------------------------------------------------------


def test_requests_run_while_adapters_come_and_go(http: Any, server: LocalServer) -> None:
    async def asks() -> list[str]:
        async with server.async_client() as client:
            calls = [
                client.chat.completions.create(model="quire-demo", messages=WHO, temperature=0, max_tokens=64)  # type: ignore[arg-type]
                for _ in range(24)
            ]
            return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asyncio.run, asks())
        for number in range(10):
            upload(http, f"mine-{number}", FILES)
            body = {"model": f"mine-{number}", "messages": WHO, "max_tokens": 4}
            assert http.post(CHAT, json=body).status_code == 200
            assert http.delete(f"{ADAPTERS}/mine-{number}").json()["freed_bytes"] > 0
        assert len(set(answers.result())) == 1


def test_who_is_asleep_takes_nothing(http: Any, server: LocalServer) -> None:
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, enable_admin_routes=True) as server, server.http() as http:
        assert http.post("/sleep").status_code == 200
        answer = send(http, FORM)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_sleeping"
        assert stored(server) == []
        assert http.post("/wake_up").status_code == 200
        upload(http, "mine", FILES)
