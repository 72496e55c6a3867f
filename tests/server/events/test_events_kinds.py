"""What /v1/engine/events tells of engines of every kind: adapters, images, swapping, sleep, other processes, states."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.demo import adapter_path, picture_path
from quire.platform.engine.watching import snapshot
from quire.platform.execution import worker
from tests.server.api_server import LocalServer
from tests.server.events.helpers import ROUTE, Asking, State, read, stepping, until, watching

pytestmark = pytest.mark.slow

PROMPT = [60, 61, 62, 63, 64, 65] * 4  # three blocks of 8
OTHER = [70, 71, 72, 73, 74, 75] * 4


@pytest.fixture(scope="module")
def bundled() -> Iterator[LocalServer]:
    """One adapter at a time can be used, and main memory has room for two."""
    engine = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "num_gpu_blocks_override": 512}
    with LocalServer(engine, enable_admin_routes=True) as server:
        for name, folder in (("one", "french"), ("two", "shout"), ("three", "french")):
            server.engine.llm_engine.load_lora_adapter(name, str(adapter_path(folder)))
        yield server


def test_adapters_by_tier(bundled: LocalServer) -> None:
    engine = bundled.engine.llm_engine
    with bundled.http() as http, stepping(bundled) as step, watching(http) as states:
        begun = next(states)
        infos = {info.name: info for info in engine.list_lora_adapters()}
        assert {row.name: row.tier for row in begun.adapters} == {name: info.tier for name, info in infos.items()}
        assert {row.tier for row in begun.adapters} == {"host", "disk"}
        assert all((row.bytes, row.rank) == (infos[row.name].bytes, 8) for row in begun.adapters)

        first = Asking(bundled, PROMPT, model="two", max_tokens=6)
        until(states, lambda state: state.requests)
        step(3)
        runs = until(states, lambda state: state.requests[0].state == "running")
        assert (runs.adapters[0].name, runs.adapters[0].tier, runs.adapters[0].requests) == ("two", "device", 1)
        assert runs.requests[0].adapter == "two"

        second = Asking(bundled, PROMPT, model="three", max_tokens=6)
        base = Asking(bundled, PROMPT, max_tokens=6)
        until(states, lambda state: len(state.requests) == 3)
        step(1)
        waits = until(states, lambda state: sum(row.state == "running" for row in state.requests) == 2)
        assert [(row.adapter, row.state) for row in waits.requests] == [
            ("two", "running"), (None, "running"), ("three", "adapter"),
        ]  # fmt: skip
        # Nothing is shared across adapters, whatever the prompts.
        assert {shared for owner, shared in waits.kv.blocks() if owner > 1} == {1}
        assert any((made.sequences, made.adapters) == (2, 1) for made in waits.steps)
        engine.pin_lora_adapter("one")
        step(1000)
        over = until(states, lambda state: not state.requests)
        assert {row.name: (row.pinned, row.requests) for row in over.adapters} == {
            "one": (True, 0), "two": (False, 0), "three": (False, 0),
        }  # fmt: skip
        engine.pin_lora_adapter("one", False)
    for asking in (first, second, base):
        assert asking.result()["usage"]["completion_tokens"] == 6
    bundled.until_idle()


def test_an_image_on_its_way(bundled: LocalServer) -> None:
    picture = "data:image/png;base64," + base64.b64encode(picture_path().read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is this?"}]
    with bundled.http() as http, stepping(bundled) as step, watching(http) as states:
        asking = Asking(bundled, None, "/v1/chat/completions", messages=[{"role": "user", "content": content}])
        arriving = until(states, lambda state: state.requests)
        (row,) = arriving.requests
        assert (row.state, row.blocks, row.computed_tokens) == ("images", 0, 0)
        made = []

        def seen(state: State) -> bool:
            made.extend(one for one in state.steps if one.media)
            step(1)  # one by one: an event tells of the last 64 at most
            return bool(made)

        until(states, seen)
        assert made[0].media == 1 and made[0].prefill_tokens > row.prompt_tokens  # its placeholders were one marker
        step(1000)
    assert asking.result()["usage"]["prompt_tokens"] == made[0].prefill_tokens
    bundled.until_idle()


def test_it_sleeps_while_it_is_watched(bundled: LocalServer) -> None:
    with bundled.http() as http, bundled.http() as other, watching(http) as states:
        assert not next(states).sleeping
        assert other.post("/sleep").status_code == 200
        asleep = until(states, lambda state: state.sleeping)
        assert (asleep.kv.free, asleep.kv.total) == (512, 512)
        assert next(states).sleeping  # it goes on
        assert other.post("/wake_up").status_code == 200
        until(states, lambda state: not state.sleeping)


def test_swapped(plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests grow until the pool has room for one: the later one's blocks wait in main memory."""
    monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 20)
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 8}
    with LocalServer(engine) as server, server.http() as http, stepping(server) as step, watching(http) as states:
        first, second = Asking(server, PROMPT, max_tokens=30), None
        until(states, lambda state: state.requests)
        second = Asking(server, OTHER, max_tokens=30)
        both = until(states, lambda state: len(state.requests) == 2)
        assert (both.kv.swapped, both.kv.swap_total) == (0, 20)
        state = both
        while all(row.state != "swapped" for row in state.requests):
            step(1)
            state = until(states, lambda state: state.steps)
        older, newer = state.requests
        assert (older.state, newer.state, newer.blocks) == ("running", "swapped", 0)
        assert state.kv.swapped >= 3 and older.number < newer.number
        assert {owner for owner, _ in state.kv.blocks()} <= {0, 1, older.number}
        step(1000)
        assert until(states, lambda state: not state.requests).kv.swapped == 0
    for asking in (first, second):
        assert asking.result()["usage"]["completion_tokens"] == 30


def test_a_worker_in_another_process(plain_model: Path) -> None:
    """The scheduler is here, whoever computes."""
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 64, "executor": "process", "debug": False}
    with LocalServer(engine) as server, server.http() as http, stepping(server) as step, watching(http) as states:
        assert next(states).kv.map == [[64, 0, 0]]
        asking = Asking(server, PROMPT, max_tokens=10)
        until(states, lambda state: state.requests)
        step(3)
        runs = until(states, lambda state: state.requests[0].output_tokens == 3)
        assert (runs.requests[0].computed_tokens, runs.kv.owned) == (26, 4)
        step(100)
        assert until(states, lambda state: not state.requests).kv.cached == 4
        assert asking.result()["usage"]["completion_tokens"] == 10


def test_nothing_that_anybody_said(bundled: LocalServer) -> None:
    """Not a prompt's text or tokens, an answer's, a client's names for its requests, an image, a path."""
    word = "Zanzibarquux"
    ids = bundled.engine.llm_engine.tokenizer(word * 3)["input_ids"]
    picture = base64.b64encode(picture_path().read_bytes()).decode()
    url = f"data:image/png;base64,{picture}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"Say {word}."}]
    named = {"user": "u-Marrakesh", "cache_salt": "s-Marrakesh", "stop": ["w-Marrakesh"], "max_tokens": 40}
    with bundled.http() as http, http.stream("GET", f"{ROUTE}?rate=10") as answer, stepping(bundled) as step:
        lines: list[str] = []
        states = read(_kept(answer.iter_lines(), lines))
        asked = [
            Asking(bundled, word * 3, request_id="r-Marrakesh", model="two", **named),
            Asking(bundled, ids, **named),
            Asking(bundled, None, "/v1/chat/completions", messages=[{"role": "user", "content": content}], **named),
        ]
        until(states, lambda state: len(state.requests) == 3)
        for _ in range(8):
            step(5)
            next(states)
        step(1000)
        until(states, lambda state: not state.requests)
    said = [choice.get("text") or choice["message"]["content"] for one in asked for choice in one.result()["choices"]]
    text = "\n".join(lines)
    assert len(text) > 5_000
    folders = [str(adapter_path("french").parent), str(bundled.engine.llm_engine.path.parent)]
    for secret in (word, "Marrakesh", picture[:40], str(ids)[1:-1], json.dumps(ids)[1:-1].replace(" ", ""), *folders):
        assert secret not in text
    assert all(len(answer) > 20 and answer[5:25] not in text for answer in said)


def _kept(lines: Iterator[str], into: list[str]) -> Iterator[str]:
    for line in lines:
        into.append(line)
        yield line


def test_more_than_are_told(plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run come first."""
    monkeypatch.setattr(snapshot, "MOST_REQUESTS", 20)
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    with LocalServer(engine) as server, server.http() as http:
        with stepping(server) as step, watching(http) as states:
            asked = [Asking(server, [60 + place] * 9, max_tokens=2) for place in range(30)]
            state = until(states, lambda state: len(state.requests) + state.more_requests == 30)
            assert (len(state.requests), state.more_requests) == (20, 10)
            step(1)
            state = until(states, lambda state: state.kv.owned)
            assert [row.state for row in state.requests] == ["running"] * 4 + ["waiting"] * 16
            step(2000)
            until(states, lambda state: not state.requests)
        assert all(asking.result()["usage"]["completion_tokens"] == 2 for asking in asked)
