"""Faults of a server: the end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.api_server import ServerProcess
from tests.server.faults.helpers import InBackground, body, connect, message, streamed, until

pytestmark = pytest.mark.slow


def _refuses(server: ServerProcess) -> bool:
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_lets_streams_finish(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "30") as server:
        streams = [InBackground(server, body([n + 5], 3500)) for n in range(2)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(server))
        assert all(stream.is_alive() for stream in streams)
        for stream in streams:
            made = stream.events()
            assert len(streamed(made)) == 3500 and made[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


def test_sigterm_ends_streams_that_take_too_long(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "0.3") as server:
        streams = [InBackground(server, body([n + 5], 4000)) for n in range(8)]
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            made = stream.events()
            assert made[-1]["error"]["code"] == "engine_unavailable"
            assert 0 < len(streamed(made)) < 4000
        assert server.process.wait(60) == 0
        assert time.monotonic() - begun < 40
    assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "60") as server:
        streams = [connect(server) for _ in range(8)]  # which nobody reads
        for stream in streams:
            stream.sendall(message(body(max_tokens=4000, stream=True)))
            assert stream.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(server))
        until(lambda: "8 requests may finish for up to 60 s; a second Ctrl-C (or SIGTERM) ends" in server.log)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(40)
        assert time.monotonic() - begun < 30  # and not 60
        assert code in (0, 1, -signal.SIGTERM)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_it_says_at_once_what_it_loads_and_a_signal_ends_that(number: int, code: int, seconds: float) -> None:
    """Wherever the imports are: some libraries pass an exception over that comes in the middle of them."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-format", "json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["message"] == "loading the bundled model"
        time.sleep(seconds)
        process.send_signal(number)
        assert process.wait(60) == code
        assert "Traceback" not in process.stderr.read()


def test_it_says_what_it_loads_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "quire", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = ""
        while "loading the bundled model" not in before:
            line = process.stderr.readline()
            assert line, before[-3000:]
            before += line
        process.kill()
    assert re.search(r"\| +typer\b", before) and not re.search(r"\| +torch\b", before)


def test_it_does_not_wait_for_what_is_imported(plain_model: Path, tmp_path: Path) -> None:
    """A worker imports peft meanwhile, for adapters to come: that takes seconds, and longer on a busy machine."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("import time\ntime.sleep(3600)\n")
    with ServerProcess("--model", str(plain_model), "--enable-lora", PYTHONPATH=str(tmp_path)) as server:
        assert server.stop() == 0
