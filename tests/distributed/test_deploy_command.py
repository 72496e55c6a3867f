"""`quire deploy`, as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("port: 0\ndeploy: {name: command, replicas: {cpus: 1, drain_s: 60}}\n")
    return str(path)


def begun(*words: str) -> tuple[subprocess.Popen[str], str]:
    """The command's process, and where the door listens."""
    command = [sys.executable, "-m", "quire", "deploy", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"command listens on (http://[\d.:]+)", line):
            return process, found[1]
    raise AssertionError(f"it did not start: {process.wait(60)}")


def applications() -> set[str]:
    from ray import serve

    return set(serve.status().applications)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_application_once_its_requests_have_finished(cluster: Any, config: str, number: int) -> None:
    process, address = begun(config, "--address", cluster.address)
    body = {"model": "quire-demo", "prompt": "One day", "n": 16, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(number)
        found = [first, *(line for line in lines if line)]
    assert found[-1] == "data: [DONE]" and sum('"finish_reason":"length"' in line for line in found) == 16
    assert process.wait(120) == 0
    assert "command" not in applications()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_it_may_be_left_and_ended_later(cluster: Any, config: str) -> None:
    process, address = begun(config, "--address", cluster.address, "--detach")
    assert process.wait(60) == 0
    time.sleep(1.0)  # what its end might end
    body = {"model": "quire-demo", "prompt": "One day", "max_tokens": 4}
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200
    words = ["deploy", config, "--address", cluster.address, "--delete"]
    assert subprocess.run([sys.executable, "-m", "quire", *words], timeout=300).returncode == 0
    assert "command" not in applications()
