"""The executor whose worker is in a process of its own, of this machine.

Plans and results go through a pipe; pixels through memory that both map.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.platform.execution.link import errands_at_once
from quire.platform.execution.remote import RemoteExecutor, bound_sending
from quire.platform.execution.wire import send_tensors
from quire.platform.execution.worker_process import Channels, Place

_KILL_SECONDS = 2.0  # for its end
_COMMAND = "import sys; from quire.platform.execution.worker_process import start; start(sys.argv[1])"


class ProcessExecutor(RemoteExecutor):
    """Starts the worker's process. Raises what `RemoteExecutor` raises."""

    link: ProcessLink

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        place: Place | None = None,
        threads: int = 0,
        inherited: Sequence[int] = (),
    ) -> None:
        """inherited: descriptors that the process has, too."""
        if os.name != "posix":
            raise QuireError("executor='process': needs a POSIX system; leave it out.")
        super().__init__(config, path, ProcessLink(errands_at_once(config), inherited), place, threads)


class ProcessLink:
    """A process that is started here. As `Link` has it."""

    def __init__(self, errands_at_once: int, inherited: Sequence[int]) -> None:
        self.steps, steps_there = Pipe()
        self._tensors, tensors_there = socket.socketpair()
        errands = [Pipe() for _ in range(errands_at_once)]
        life_there, life = os.pipe()
        channels = Channels(
            steps_there.fileno(), tensors_there.fileno(), tuple(there.fileno() for _, there in errands), life_there
        )
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps(asdict(channels))],
            pass_fds=[channels.steps, channels.tensors, *channels.errands, channels.life, *inherited],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        tensors_there.close()
        for connection in (steps_there, *(there for _, there in errands)):
            connection.close()
        os.close(life_there)
        self.errands = [channel for channel, _ in errands]
        bound_sending(self._tensors.fileno())
        ours: list[Connection | socket.socket] = [self.steps, self._tensors, *self.errands]
        self.end = weakref.finalize(self, _end, self.process, ours, life, os.getpid())

    def pixels(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        return send_tensors(self._tensors, inputs)

    def ending(self, seconds: float = 0) -> str | None:
        if seconds:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        code = self.process.poll()
        if code is None:
            return None
        return f"the worker's process has ended ({f'signal {-code}' if code < 0 else f'exit status {code}'})"


def _end(
    process: subprocess.Popen[bytes], channels: Sequence[Connection | socket.socket], life: int, parent: int
) -> None:
    """parent: whose worker it is; a process that was forked from that one only has a copy."""
    if os.getpid() != parent:
        return
    for channel in channels:
        channel.close()
    os.close(life)
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # what a disk does not answer cannot be killed until it does
        process.wait(_KILL_SECONDS)
