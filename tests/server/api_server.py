"""Servers for tests: a real process (`ServerProcess`), and one in a thread, whose engine can be reached."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from openai import AsyncOpenAI, OpenAI

from quire.config import ServerConfig
from quire.config.arguments import engine_config
from quire.platform.engine.async_engine import AsyncEngine
from quire.server.app import create_app
from quire.server.metrics import Metrics
from quire.server.uploads.store import adapter_store
from tests.server.wire import InThread

KEY = "a-test-key"  # what the clients send; servers without --api-key do not look at it
START = 180.0  # seconds, on a machine that does much else
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of a server's environment: the bundled model is small


class _Server:
    """What listens at `url`, and clients of it."""

    url = ""

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 60, **options})

    def async_client(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, "max_retries": 0, "timeout": 60, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})


class ServerProcess(_Server):
    """`python -m quire.server` with these arguments, on a free port. Use as a context manager."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._command = [sys.executable, "-m", "quire.server", "--port", "0", *arguments]
        self._environment = {**os.environ, **environment}
        self._lines: list[str] = []

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=self._environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        end = time.monotonic() + START
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"the server did not start:\n{self.log}")
            time.sleep(0.02)
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            found = re.search(r"listening on (https?://\S+?)[\"\s]", line)
            if found:
                self.url = found[1]

    @property
    def log(self) -> str:
        """What it has written to standard error so far; all of it, once it has ended."""
        if self.process.poll() is not None:
            self._reader.join(5)
        return "".join(self._lines)

    def line_of(self, request_id: str, timeout: float = 60.0) -> str:
        """The one line of the log about this request: it is written after the answer, and read after that."""
        end = time.monotonic() + timeout
        while not (lines := [line for line in self.log.splitlines() if f"request_id={request_id}" in line]):
            assert time.monotonic() < end, f"no line about {request_id}:\n{self.log}"
            time.sleep(0.01)
        (line,) = lines
        return line

    def stop(self, timeout: float = START) -> int:
        """SIGTERM, and wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(5)


class LocalServer(_Server):
    """The same server in a thread of this process: tests may look into its engine, and break it.

    model: of the engine's arguments; server: fields of ServerConfig. The engine runs with debug=True (its tables are
    checked after every step) unless it is said otherwise.
    """

    def __init__(self, engine: dict[str, Any] | None = None, **server: Any) -> None:
        self._settings = ServerConfig(**{"port": 0, "shutdown_timeout": 0.5, **server})
        self.metrics = Metrics()
        self.engine = AsyncEngine(engine_config(**{"debug": True, **(engine or {})}), self.metrics.on_step)
        self.app = create_app(self.engine, self._settings, self.metrics, adapter_store(self._settings))
        self.url = ""

    def __enter__(self) -> LocalServer:
        self._served = InThread(self.app, self._settings, START)
        self.url = self._served.__enter__().url
        return self

    def __exit__(self, *error: object) -> None:
        self._served.__exit__(*error)

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """Every step but the first waits for the event."""
        gate, loop, steps = threading.Event(), self.engine.step_loop, itertools.count()
        on_step = loop._on_step
        loop._on_step = lambda *_: next(steps) and gate.wait(60)
        try:
            yield gate
        finally:
            gate.set()
            loop._on_step = on_step

    @contextmanager
    def slowed(self, seconds: float = 0.1) -> Iterator[threading.Event]:
        """Each step takes so long until the event is set: what runs has not ended, on a busy machine too."""
        executor: Any = self.engine.llm_engine.executor  # in this process, with a runner to lay hands on
        runner, fast = executor.runner, threading.Event()
        execute = runner.execute
        runner.execute = lambda plan: (fast.wait(seconds), execute(plan))[1]
        try:
            yield fast
        finally:
            fast.set()
            runner.execute = execute

    def until_idle(self, timeout: float = 60.0) -> None:
        """Wait until nothing runs or waits any more; then every block must be back, and all tables agree."""
        end = time.monotonic() + timeout
        engine = self.engine.llm_engine
        while engine.has_unfinished_requests() or self.app.state.context.sequences:
            assert time.monotonic() < end, f"still unfinished: {engine.get_num_unfinished_requests()}"
            time.sleep(0.01)
        engine.check_integrity()
        assert engine.pool.num_free == engine.pool.num_blocks


def adapters(path: Path) -> list[str]:
    """Flags for a server whose adapters may be loaded from a folder over HTTP."""
    return ["--enable-lora", "--allow-runtime-lora", "--lora-root", str(path)]
