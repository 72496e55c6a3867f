"""Faults of a server: steps that fail."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.platform.scheduling.plan import StepPlan, StepResult
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.faults.helpers import (
    COMPLETIONS,
    InBackground,
    body,
    events,
    executing,
    small,
    streamed,
    tokens,
    until,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_ends_its_own_request_and_no_other(tiny: LocalServer, stream: bool) -> None:
    victim = [7, 7, 7]
    others = [body([10 + n, 20, 30], 60, temperature=n % 2, seed=n) for n in range(4)]
    alone = [tokens(tiny, other) for other in others]
    engine = tiny.engine.llm_engine

    def failing(execute: Any, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            request = engine.scheduler.request_of(chunk.sequence_id)
            if request is not None and list(request.prompt_ids) == victim and chunk.start >= 8:
                raise RuntimeError("secret at 0x7f00deadbeef")
        return execute(plan)

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=tiny.url, timeout=60) as http:
            asked = [*others[:2], body(victim, 60, stream=stream), *others[2:]]
            return await asyncio.gather(*(http.post(COMPLETIONS, json=one) for one in asked))

    with executing(tiny, failing):
        answers = asyncio.run(run())
    failed = answers.pop(2)
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == alone
    assert "0x7f" not in failed.text and "secret" not in failed.text
    if stream:
        made = events(failed.text.splitlines())
        assert failed.status_code == 200 and len(streamed(made)) > 3
        assert made[-1]["error"]["type"] == "server_error"
    else:
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    tiny.until_idle()


@pytest.mark.parametrize("part", ["plan", "commit"])
def test_a_fault_of_the_engine_ends_everything_at_once(plain_model: Path, part: str) -> None:
    with LocalServer(small(plain_model)) as server, server.http() as http:
        streams = [InBackground(server, body([n + 5])) for n in range(3)]
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(http.post(COMPLETIONS, json=body([40]))))
        waiting.start()
        until(lambda: server.engine.llm_engine.get_num_unfinished_requests() == 4)
        setattr(server.engine.llm_engine.scheduler, part, lambda *_: 1 / 0)
        for stream in streams:
            made = stream.events()
            assert streamed(made) and made[-1]["error"]["code"] == "engine_unavailable"
        waiting.join(60)
        assert whole[0].status_code == 503
        with server.http() as more:
            assert more.get("/health").status_code == more.get("/ready").status_code == 503
            refused = more.post(COMPLETIONS, json=body())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
        assert server.app.state.context.sequences == 0


FAILING = """
from quire.platform.scheduling.scheduler import Scheduler
from quire.cli.app import app

commit, steps = Scheduler.commit, []

def failing(*args):
    steps.append(1)
    if len(steps) > 100:
        raise RuntimeError("a fault")
    return commit(*args)

Scheduler.commit = failing
import runpy
runpy.run_module("quire.server", run_name="__main__")
"""


def test_a_process_whose_engine_fails_ends_with_exit_code_1(plain_model: Path) -> None:
    server = ServerProcess("--model", str(plain_model))
    server._command[1:3] = ["-c", FAILING]
    with server:
        made = InBackground(server, body()).events()
        assert len(streamed(made)) > 50 and made[-1]["error"]["type"] == "service_unavailable_error"
        assert server.process.wait(60) == 1
    assert "a fault" in server.log


def test_health_tells_of_a_step_that_hangs(plain_model: Path) -> None:
    hang = threading.Event()

    def hanging(execute: Any, plan: StepPlan) -> StepResult:
        assert hang.wait(60)
        return execute(plan)

    with LocalServer(small(plain_model), step_timeout=0.2) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        with executing(server, hanging):
            thread = threading.Thread(target=lambda: tokens(server, body(max_tokens=3)))
            thread.start()
            until(lambda: http.get("/health").status_code == 503)
            assert "over 0.2 s" in http.get("/health").json()["error"]["message"]
            assert http.get("/v1/models").status_code == http.get("/metrics").status_code == 200
            hang.set()
            thread.join(60)
        until(lambda: http.get("/health").status_code == 200)
        server.until_idle()
