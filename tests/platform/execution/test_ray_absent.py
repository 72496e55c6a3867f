"""Workers on Ray: what can be told without a cluster."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError
from quire.platform.execution import ray_worker
from quire.platform.execution.ray_worker import accept


def test_without_ray(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(QuireError, match=r"pip install quire-llm\[ray\]"):
        LLM(str(tiny_path), distributed_executor_backend="ray")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "'uni' and tensor_parallel_size=2"),
        ({"distributed_executor_backend": "ray", "executor": "process"}, "leave one of them out"),
        ({"ray_worker_cpus": 2}, "ray_worker_cpus: is for"),
        ({"distributed_executor_backend": "external_launcher"}, "mp, ray"),
    ],
)
def test_settings_that_contradict(tiny_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(QuireError, match=said):
        LLM(str(tiny_path), **settings)


def test_digests_of_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    large = tmp_path / "model.safetensors"
    large.write_bytes(bytes(3 << 20))
    before = ray_worker.files_digest(tmp_path)
    assert before == ray_worker.files_digest(tmp_path) != ray_worker.files_digest(large)
    large.write_bytes(bytes((3 << 20) - 1) + b"1")
    assert before != ray_worker.files_digest(tmp_path)
    assert ray_worker.files_digest(tmp_path / "nothing") == ""


def test_a_stranger_that_says_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes soon, and the whole of it never."""
    monkeypatch.setattr(ray_worker, "_PROOF_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        found: list[Any] = []
        taker = threading.Thread(target=lambda: found.append(accept(listener, b"key")))
        taker.start()
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall((200).to_bytes(4, "big"))
            said = 0
            while taker.is_alive() and said < 199:
                with contextlib.suppress(OSError):  # it was cut
                    stranger.sendall(b"x")
                said += 1
                taker.join(0.05)
            assert not taker.is_alive() and said < 199
        assert found == [None]


def test_one_that_is_late_and_right() -> None:
    """Its proof was whole when its time was over: it was cut all the same, and is not taken for good."""
    here, there = Pipe()
    with pytest.raises(TimeoutError, match="within 0 s"), ray_worker._limit(here, 0):
        with pytest.raises(EOFError):
            here.recv_bytes()
        there.close()


def test_strangers_get_no_connection() -> None:
    """Whoever does not have the key, sends something else or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        port, found = listener.getsockname()[1], []

        def take(key: bytes) -> None:
            found.append(accept(listener, key))

        def connect() -> None:
            with pytest.raises(Exception):  # noqa: B017  # whatever multiprocessing raises for a key that is wrong
                ray_worker._connect("127.0.0.1", port, b"wrong", "0 0")

        taker = threading.Thread(target=take, args=(b"right",))
        taker.start()
        connect()
        taker.join()
        taker = threading.Thread(target=take, args=(b"right",))
        taker.start()
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            taker.join()
        taker = threading.Thread(target=take, args=(b"right",))
        taker.start()
        ours = ray_worker._connect("127.0.0.1", port, b"right", "0 0")
        taker.join()
        assert found[:2] == [None, None] and found[2] is not None and found[2][0] == "0 0"
        ours.close()
        found[2][1].close()
