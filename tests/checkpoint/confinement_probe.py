"""What a confined process tries; imported there."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any

from quire.checkpoint import confined


def attempts(job: dict[str, Any]) -> dict[str, Any]:
    """What came of each: "refused", or what it gave."""
    libc = ctypes.CDLL(None)
    calls = {name: getattr(libc, name) for name in ("socket", "open", "unlink", "fork", "kill")}
    path = job["path"]
    confined.confine(30, 256 << 20, 1 << 20)
    python = {
        "socket": lambda: socket.socket(),
        "write": lambda: Path(path + ".new").write_text(""),
        "program": lambda: os.system(f"touch {path}.new"),
        "remove": lambda: os.remove(path),
        "memory": lambda: len(bytearray(1 << 30)),
    }
    kernel = {
        "socket": lambda: calls["socket"](2, 1, 0),
        "open": lambda: calls["open"]((path + ".new").encode(), os.O_WRONLY | os.O_CREAT, 0o600),
        "unlink": lambda: calls["unlink"](path.encode()),
        "fork": lambda: calls["fork"](),
        "kill": lambda: calls["kill"](os.getppid(), 9),
    }
    read = Path(path).read_text()
    return {
        "python": {name: _refused(attempt) for name, attempt in python.items()},
        "kernel": {name: attempt() == -1 for name, attempt in kernel.items()},
        "read": read,
        "environment": sorted(os.environ),
    }


def _refused(attempt: Any) -> bool:
    try:
        attempt()
    except (PermissionError, MemoryError):
        return True
    return False


def sleep(job: dict[str, Any]) -> dict[str, Any]:
    time.sleep(60)
    return {}


def talk(job: dict[str, Any]) -> dict[str, Any]:
    return {"text": "x" * job["length"]}
