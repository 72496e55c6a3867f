"""Faults of a server: clients that leave."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

import pytest

from quire.platform.scheduling.plan import StepPlan, StepResult
from tests.server.api_server import LocalServer
from tests.server.faults.helpers import body, connect, executing, message, tokens, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("leave", [socket.socket.close, lambda client: client.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("when", ["in mid-stream", "before the first token", "before the answer"])
def test_a_client_that_hangs_up_is_aborted_within_one_step(
    tiny: LocalServer, when: str, leave: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By the step that runs when the server has noticed, and the next: each waits until there was time to notice."""
    begun, gate = threading.Semaphore(0), threading.Event()
    steps: list[StepPlan] = []

    def held(execute: Any, plan: StepPlan) -> StepResult:
        steps.append(plan)
        if len(steps) > (when == "in mid-stream"):
            begun.release()
            assert gate.wait(60)
        return execute(plan)

    with executing(tiny, held), connect(tiny) as client:
        client.sendall(message(body(stream=when != "before the answer")))
        received = b""
        while when == "in mid-stream" and b"data: " not in received:
            received += client.recv(65536)
        assert begun.acquire(timeout=60)
        leave(client)
        until(lambda: not tiny.app.state.context.sequences)
        before = len(steps)
        gate.set()
        tiny.until_idle()
        assert len(steps) - before <= 1
    assert not tiny.engine.llm_engine.scheduler.running
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_half_a_body_and_a_hang_up_leave_nothing(tiny: LocalServer) -> None:
    for length in (0, 1, 20):
        with connect(tiny) as client:
            client.sendall(message(json.dumps(body()).encode()[:length], length=500))
    assert len(tokens(tiny, body(max_tokens=3))) == 3
    tiny.until_idle()
