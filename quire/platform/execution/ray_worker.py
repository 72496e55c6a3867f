"""A worker in an actor of Ray's: found, started and watched by Ray, told what to do by a connection of its own.

Ray takes half a millisecond for a call and its answer; a connection that is looked at takes a fifth of that.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

from quire.platform.execution.worker_process import serve

_MEET_SECONDS = 60  # for a worker to reach the engine, and then until both have proved themselves
_PROOF_SECONDS = 10  # for a connection that the engine has taken: others wait meanwhile
_READERS = 4  # of a model's files


class Introduction(NamedTuple):
    """What must be alike of processes that compute one model, and where this one is. files: of the model, as
    `files_digest` has it. node: Ray's name of its own part of the cluster, address: by which others reach it; machine:
    whose memory it has, of which several nodes may be a part; pid: there."""

    versions: str
    files: str
    node: str
    address: str
    machine: str
    pid: int


class RayWorker:
    """What the actor runs. Its process is the worker's alone."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: variables of the engine's process that say how kernels run."""
        os.environ.update(environment)
        self._memory = -1

    def introduce(self, path: str) -> Introduction:
        """path: the model's files."""
        import ray

        from quire import huge_pages

        node = ray.get_runtime_context().get_node_id()
        address = ray.util.get_node_ip_address()
        return Introduction(versions(), files_digest(Path(path)), node, address, huge_pages.owner(), os.getpid())

    def share_memory(self, size: int) -> str:
        """Make memory for an exchange of so many processes of this machine; returns the path that they open it by."""
        from quire.kernels.exchange import shared_memory

        self._memory = shared_memory(size)
        return f"/proc/{os.getpid()}/fd/{self._memory}"

    def serve(self, rank: int, host: str, port: int, key: bytes, errands: int) -> None:
        """Serve the engine that listens there, by one connection for steps and some for errands, until it is gone."""
        connections = [_connect(host, port, key, f"{rank} {number}") for number in range(1 + errands)]
        serve(connections[0], connections[1:], None)


def versions() -> str:
    """What the bits of an answer may depend on beside model and settings."""
    import torch

    from quire import __version__, kernels
    from quire.kernels import native

    back_end = kernels.backend()
    isa = f" for {native.isa()}" if back_end is native else ""
    return f"quire {__version__}, torch {torch.__version__}, {back_end.__name__.rpartition('.')[2]} kernels{isa}"


def files_digest(path: Path) -> str:
    """Of a model's files, those of its folder and of the folders in it: their names and all of their bytes. Empty:
    there are none."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        return ""
    whole = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as pool:  # hashing lets go of Python's lock
        for file, digest in zip(files, pool.map(_digest, files), strict=True):
            whole.update(f"{file.relative_to(path.parent)}\n".encode("utf-8", "surrogateescape") + digest)
    return whole.hexdigest()


def _digest(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


# -- connections: both ends prove that they have the key, which Ray has brought to the worker --------------------------


def _connect(host: str, port: int, key: bytes, name: str) -> Connection:
    """name: what the engine knows the connection by."""
    with socket.create_connection((host, port), timeout=_MEET_SECONDS) as opened:
        connection = _connection(opened)
    with _limit(connection, _MEET_SECONDS):
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send_bytes(name.encode())
    return connection


def accept(listener: socket.socket, key: bytes) -> tuple[str, Connection] | None:
    """A connection that came, and its name; None where it is a stranger's, or none has come in the listener's time."""
    try:
        opened, _ = listener.accept()
    except TimeoutError:
        return None
    with opened:
        connection = _connection(opened)
    try:
        with _limit(connection, _PROOF_SECONDS):
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            name = connection.recv_bytes(100).decode()
        return name, connection
    except Exception:  # whatever a stranger sends
        connection.close()
        return None


def _connection(opened: socket.socket) -> Connection:
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a message goes in two pieces, and nobody waits
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection: Any = Connection(opened.detach())
    return connection  # type: ignore[no-any-return]


@contextmanager
def _limit(connection: Connection, seconds: float) -> Iterator[None]:
    """Of all that is said within: a stranger that says nothing, or a byte now and then, keeps nobody waiting. Raises
    TimeoutError, or what a connection raises that is cut."""
    late = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as same:

        def cut() -> None:
            late.set()
            with suppress(OSError):  # the other end was faster
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
    if late.is_set():
        raise TimeoutError(f"the other end has not proved itself within {seconds:g} s")
