"""A batch's requests on their way through an application: how many at once, and what is done when there is no room."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.server.batch.answers import Answered, AnswerFile
from quire.server.batch.in_process import ask
from quire.server.batch.plan import make_plan
from quire.server.batch.requests import BatchRequest, read_request
from quire.server.batch.run import BatchEndedError, BatchRun

_MOST = 1 << 20  # bytes of a body


class Application:
    """Answers after a while, with 429 while it has more than `room` requests, and counts them."""

    def __init__(self, room: int = 1000, status: int = 200) -> None:
        self._room = room
        self._status = status
        self.running = self.most = self.asked = 0
        self.bytes = self.most_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.asked += 1
        status = 429 if self.running >= self._room else self._status
        if status != 429:
            self.running, self.bytes = self.running + 1, self.bytes + len(body)
            self.most, self.most_bytes = max(self.most, self.running), max(self.most_bytes, self.bytes)
            try:
                await asyncio.sleep(0.001)
            finally:
                self.running, self.bytes = self.running - 1, self.bytes - len(body)
        headers = [(b"x-request-id", dict(scope["headers"])[b"x-request-id"])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"usage":{"prompt_tokens":2,', "more_body": True})
        await send({"type": "http.response.body", "body": b'"completion_tokens":3}}'})


def requests(number: int, text: str = "") -> Iterator[BatchRequest]:
    for place in range(number):
        body = {"prompt": text, "place": place}
        whole = {"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": body}
        yield read_request(json.dumps(whole).encode())


def ran(app: Application, path: Path, asked: Iterator[BatchRequest], bytes_of_one: int = _MOST) -> BatchRun:
    with AnswerFile(path) as file:
        run = BatchRun(partial(ask, app), file, 8, bytes_of_one, lambda tally: None)
        asyncio.run(asyncio.wait_for(run.run(asked), 60))
    return run


def test_so_many_are_in_flight_and_no_more(tmp_path: Path) -> None:
    app = Application()
    run = ran(app, tmp_path / "out", requests(50))
    assert app.most == 8 and app.asked == 50
    assert run.tally.statuses == {200: 50} and (run.tally.prompt_tokens, run.tally.output_tokens) == (100, 150)
    names = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert sorted(names, key=int) == [str(place) for place in range(50)]


def test_large_bodies_wait_for_each_other(tmp_path: Path) -> None:
    app = Application()
    ran(app, tmp_path / "out", requests(12, "x" * 1000), bytes_of_one=600)
    assert app.most == 2 and app.most_bytes <= 4 * 600
    app = Application()
    ran(app, tmp_path / "out", requests(3, "x" * 10_000), bytes_of_one=600)  # each larger than all may be
    assert app.most == 1 and app.asked == 3


@pytest.mark.parametrize("room", [1, 3])
def test_where_there_is_no_room_it_asks_again(tmp_path: Path, room: int) -> None:
    app = Application(room)
    run = ran(app, tmp_path / "out", requests(30))
    assert run.tally.statuses == {200: 30} and app.most == room and app.asked > 30


def test_an_engine_that_ends_ends_the_batch(tmp_path: Path) -> None:
    with pytest.raises(BatchEndedError):
        ran(Application(status=503), tmp_path / "out", requests(20))
    assert not (tmp_path / "out").exists()  # nothing was answered


def test_a_million_lines_take_no_memory_to_speak_of(tmp_path: Path) -> None:
    """By a part of them: what is kept of a line is a few bytes, however long it is."""
    number = 10_000
    (tmp_path / "one").write_bytes(b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}')
    make_plan(tmp_path / "one", Answered(b"", b"", 0), _MOST)  # what numpy imports when it is first used
    with open(tmp_path / "in", "wb") as file:
        for place in range(number):
            body = {"prompt": "x" * 1000}
            line = {"custom_id": f"r{place}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line).encode() + b"\n")
    with AnswerFile(tmp_path / "out") as answers:
        answered = answers.read()
        tracemalloc.start()
        plan = make_plan(tmp_path / "in", answered, _MOST)
        checked = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert sum(1 for _ in plan.open_requests()) == number
        read = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert checked < number * 150 and read < 500_000
