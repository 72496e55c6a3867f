"""Faults of a server: crowds."""

from __future__ import annotations

import asyncio
import base64
import random
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.demo import picture_path
from quire.platform.scheduling.plan import StepPlan, StepResult
from tests.server.api_server import LocalServer
from tests.server.faults.helpers import (
    COMPLETIONS,
    LOADED,
    _load_all,
    body,
    connect,
    events,
    everything,
    executing,
    message,
    small,
    tokens,
    until,
)

pytestmark = pytest.mark.slow

PICTURE = "data:image/png;base64," + base64.b64encode(picture_path().read_bytes()).decode()


def test_a_slow_reader_gets_everything_and_slows_nobody(tiny: LocalServer) -> None:
    slow, quick = body([9], 300, n=4, temperature=1, seed=3, logprobs=20), body([11], 50)
    with tiny.http() as http:
        expected = [choice["token_ids"] for choice in http.post(COMPLETIONS, json=slow).json()["choices"]]
    with connect(tiny, receive_buffer=4096) as client:
        client.sendall(message({**slow, "stream": True}, COMPLETIONS, "Connection: close"))
        until(lambda: tiny.engine.llm_engine.has_unfinished_requests())
        assert len(tokens(tiny, quick)) == 50
        until(lambda: not tiny.engine.llm_engine.has_unfinished_requests())  # computed, and not read
        received = everything(client)
    assert len(received) > 500_000
    lines = [line for line in received.partition(b"\r\n\r\n")[2].decode().splitlines() if line.startswith("data: ")]
    choices = [choice for event in events(lines) for choice in event["choices"]]
    for index in range(4):
        assert [token for c in choices if c["index"] == index for token in c["token_ids"]] == expected[index]
    tiny.until_idle()


def test_the_queue_is_bounded(plain_model: Path) -> None:
    gate = threading.Event()

    def gated(execute: Any, plan: StepPlan) -> StepResult:
        assert gate.wait(60)
        return execute(plan)

    with (
        LocalServer({**small(plain_model), "max_num_seqs": 2}, max_queue=1) as server,
        server.http() as http,
        executing(server, gated),
    ):
        answers: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(tokens(server, body(max_tokens=4)))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.app.state.context.sequences == 2)
        for request in (body(n=2, temperature=1), body(["a", "b"]), body(n=1, best_of=2, temperature=1)):
            full = http.post(COMPLETIONS, json=request)
            assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(full.headers["Retry-After"]) <= 60
        assert http.get("/health").status_code == 200
        gate.set()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 2
        assert http.post(COMPLETIONS, json=body(["a", "b", "c"], 2)).status_code == 200
        server.until_idle()


def test_fifty_requests_cancelled_at_random_moments(bundled: LocalServer) -> None:
    """Texts, images, adapters, mixtures of streamed and not; one that is not cancelled is as it was alone."""
    chance = random.Random(5)
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    quiet = body("Once upon a time", 40)
    alone = tokens(bundled, quiet)

    def one(number: int) -> tuple[str, dict[str, Any]]:
        model = chance.choice(["quire-demo", *LOADED])
        stream = number % 2 == 0
        if number % 3 == 0:
            return COMPLETIONS, {**body("One day", 300, ignore_eos=True, stream=stream), "model": model}
        content = [image, {"type": "text", "text": f"What do you see, {number}?"}]
        more = {"max_tokens": 300, "ignore_eos": True, "stream": stream, "model": model}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more}

    async def run() -> tuple[int, httpx.Response]:
        async with httpx.AsyncClient(base_url=bundled.url, timeout=60) as http:

            async def cancelled(number: int) -> bool:
                await asyncio.sleep(chance.uniform(0, 1.0))
                path, request = one(number)
                try:
                    await asyncio.wait_for(http.post(path, json=request), chance.uniform(0.001, 0.8))
                except TimeoutError:
                    return True
                return False

            lasting = asyncio.create_task(http.post(COMPLETIONS, json=quiet))
            gone = await asyncio.gather(*(cancelled(number) for number in range(50)))
            return sum(gone), await lasting

    _load_all(bundled)
    gone, lasting = asyncio.run(run())
    assert gone > 25
    assert lasting.json()["choices"][0]["token_ids"] == alone
    bundled.until_idle()
    assert all(info.requests == 0 for info in bundled.engine.list_lora_adapters())
    assert tokens(bundled, quiet) == alone
