"""Faults of a server: clients that leave."""

from __future__ import annotations

import json
import logging
import socket
import time
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
    begun: list[float] = []

    def slow(execute: Any, plan: StepPlan) -> StepResult:
        begun.append(time.monotonic())
        time.sleep(0.2)
        return execute(plan)

    with executing(tiny, slow), connect(tiny) as client:
        client.sendall(message(body(stream=when != "before the answer")))
        if when == "in mid-stream":
            assert b"data: " in client.recv(65536) + client.recv(65536)
        until(lambda: begun)
        leave(client)
        closed = time.monotonic()
        tiny.until_idle()
        assert sum(at > closed for at in begun) <= 1
    assert not tiny.engine.llm_engine.scheduler.running
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_half_a_body_and_a_hang_up_leave_nothing(tiny: LocalServer) -> None:
    for length in (0, 1, 20):
        with connect(tiny) as client:
            client.sendall(message(json.dumps(body()).encode()[:length], length=500))
    assert len(tokens(tiny, body(max_tokens=3))) == 3
    tiny.until_idle()
