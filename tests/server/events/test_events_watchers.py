"""Who watches: keys, bounds, nobody, many, the slow, those who leave, and the engine's end."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.platform.engine.watching import watch
from quire.server.events import hub
from tests.server.api_server import ONE_THREAD, LocalServer, ServerProcess
from tests.server.events.helpers import PATIENCE, ROUTE, Asking, read, stepping, until, watching

pytestmark = pytest.mark.slow

KEY, ADMIN = "the-key", "the-admin-key"
PROMPT = [60, 61, 62, 63, 64, 65] * 4


@pytest.fixture(scope="module")
def server(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model), "num_gpu_blocks_override": 64}) as server:
        yield server


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each was taken."""
    taken: list[float] = []
    real = watch.take_snapshot

    def counted(*given: Any) -> Any:
        taken.append(time.monotonic())
        return real(*given)

    monkeypatch.setattr(watch, "take_snapshot", counted)
    return taken


def unwatched(server: LocalServer) -> None:
    """Nobody watches, and nothing is left of those who did."""
    end = time.monotonic() + PATIENCE
    engine, events = server.engine.llm_engine, server.app.state.context.events
    while engine.recorder is not None or events._look is not None or events._watchers:
        assert time.monotonic() < end
        time.sleep(0.01)
    while any(thread.name.startswith("quire-events") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


# -- who may, and how often ------------------------------------------------------------------------------------------


def test_the_key(plain_model: Path) -> None:
    """The API's: the admin's opens it too, and is not asked for."""
    with (
        LocalServer({"model": str(plain_model)}, api_keys=(KEY,), admin_api_key=ADMIN) as server,
        server.http() as http,
    ):
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}):
            refused = http.get(ROUTE, headers=wrong)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert http.get(f"{ROUTE}?api_key={KEY}").status_code == 401
        for key in (KEY, ADMIN):
            with watching(http, headers={"Authorization": f"Bearer {key}"}) as states:
                assert next(states).kv.total
        unwatched(server)


@pytest.mark.parametrize("rate", ["0", "0.19", "10.1", "-1", "1e9", "nan", "inf", "-inf", "x", "", "4,4"])
def test_rates_that_there_are_not(server: LocalServer, rate: str) -> None:
    with server.http() as http:
        refused = http.get(f"{ROUTE}?rate={rate}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "rate"


def test_other_methods(server: LocalServer) -> None:
    with server.http() as http:
        assert {http.request(method, ROUTE).status_code for method in ("POST", "PUT", "DELETE")} == {405}


def test_so_many_and_no_more(server: LocalServer) -> None:
    with ExitStack() as held:
        clients = [held.enter_context(server.http()) for _ in range(hub.MOST_WATCHERS + 1)]
        opened = [held.enter_context(watching(client)) for client in clients[:-1]]
        for states in opened:
            next(states)
        refused = clients[-1].get(ROUTE)
        assert refused.status_code == 429 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "too_many_watchers"
        assert clients[-1].get("/v1/models").status_code == 200
    unwatched(server)
    with server.http() as http, watching(http) as states:
        assert next(states).kv.total == 64
    unwatched(server)


# -- nobody ----------------------------------------------------------------------------------------------------------


def test_nothing_is_computed_for_nobody(
    server: LocalServer, snapshots: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> Any:
        raise AssertionError("for whom?")

    monkeypatch.setattr("quire.platform.engine.watching.steps.StepRecorder.begin", never)
    monkeypatch.setattr("quire.server.events.state.StateWriter.write", never)
    unwatched(server)
    before = threading.active_count()
    assert Asking(server, PROMPT, max_tokens=50).result()["usage"]["completion_tokens"] == 50
    assert snapshots == [] and threading.active_count() <= before + 2  # readers, begun by now
    unwatched(server)


def test_who_leaves_ends_the_work(server: LocalServer, snapshots: list[float]) -> None:
    with stepping(server) as step:
        asking = Asking(server, PROMPT, max_tokens=100)
        with server.http() as http, watching(http) as states:
            until(states, lambda state: state.requests)
            step(2)
            until(states, lambda state: state.steps)
        unwatched(server)
        taken = len(snapshots)
        step(1000)
        asking.result()
    assert len(snapshots) == taken
    server.until_idle()


def test_coming_and_going(server: LocalServer) -> None:
    """Somebody who comes in the moment in which the last one goes sees all there is."""
    for _ in range(20):
        with server.http() as http, watching(http) as states:
            assert next(states).kv.total == 64
    unwatched(server)


def test_who_leaves_in_the_moment_of_an_event() -> None:
    """Is gone nevertheless."""

    async def both_at_once() -> bool:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(hub._wait(event, PATIENCE))
        await asyncio.sleep(0)
        event.set()
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled()

    assert asyncio.run(both_at_once())


# -- the slow ---------------------------------------------------------------------------------------------------------


def test_who_is_behind_gets_the_newest(server: LocalServer) -> None:
    """And nothing is kept for it meanwhile: events that nobody has taken are gone."""
    events = server.app.state.context.events

    async def watch_slowly() -> tuple[list[bytes], int, int]:
        with events.joined(10) as watcher:
            stream = events.events(watcher)
            got = [await anext(stream)]
            passed: list[weakref.ref[Any]] = []
            while len(passed) < 8:
                news = events._look.news
                passed.append(weakref.ref(events._look.event))
                await asyncio.wait_for(news.wait(), PATIENCE)
            newest = events._look.event
            got += [newest.after(0), await anext(stream)]
            del newest
            gc.collect()
            alive = sum(one() is not None for one in passed[1:])
            await stream.aclose()
            return got, alive, len(passed)

    got, alive, passed = on_loop(server, watch_slowly())
    first, newest, second = (next(read(iter(part.decode().splitlines()))).time for part in got)
    assert first < newest <= second and alive <= 1 < passed
    unwatched(server)


def on_loop(server: LocalServer, work: Any) -> Any:
    """Run this where the server runs."""
    return asyncio.run_coroutine_threadsafe(work, server.engine.step_loop._event_loop).result(PATIENCE)


def test_who_reads_nothing_takes_no_memory(plain_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event at most waits for it, however many others see meanwhile; and then its time is over."""
    for share in ("_COPYING_SHARE", "_CODING_SHARE"):
        monkeypatch.setattr(hub, share, 1.0)  # large events take long, and would be rare
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 64}
    with LocalServer(engine, send_timeout=10.0) as server, server.http() as http:
        events = server.app.state.context.events
        events._facts["model"] = "m" * 1_000_000  # large events: the system takes some megabytes for a connection
        stuck = server._served.connect(receive_buffer=4096)
        stuck.sendall(f"GET {ROUTE}?rate=10 HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        with watching(http) as states:
            next(states)
            waiting, seen = 0, 0
            while len(events._watchers) > 1:  # until the one that does not read has lost its place
                next(states)
                seen += 1
                waiting = max([waiting, *buffered(server)])
            assert 0 < waiting < 1_200_000 and seen > 3
        stuck.close()
        unwatched(server)


def buffered(server: LocalServer) -> list[int]:
    """Bytes that were written to each connection and not sent."""
    listener = server._served._server._listener
    return [c._transport.get_write_buffer_size() for c in list(listener._open) if c._transport is not None]


# -- what goes on, and what ends --------------------------------------------------------------------------------------


def test_a_long_step(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, until it is over."""
    monkeypatch.setattr(hub, "_KEEP_ALIVE", 0.1)
    gate = threading.Event()
    engine, real = server.engine.llm_engine, server.engine.llm_engine.step

    def long() -> Any:
        gate.wait(PATIENCE)
        return real()

    with server.http() as http, http.stream("GET", f"{ROUTE}?rate=10") as answer:
        lines = answer.iter_lines()
        assert next(read(lines)).requests == []
        engine.step = long  # type: ignore[method-assign]
        asking = Asking(server, PROMPT, max_tokens=3)
        comments = 0
        while comments < 3:
            comments += next(lines).startswith(":")
        gate.set()
        until(read(lines), lambda state: state.rates.requests_per_second)
        del engine.step
    asking.result()
    unwatched(server)


def test_the_end_of_the_server(plain_model: Path) -> None:
    """The streams end at once, while a request that runs has its time."""
    flags = ("--model", str(plain_model), "--shutdown-timeout", "60")
    with ServerProcess(*flags, **ONE_THREAD) as server, server.http() as http:
        with watching(http) as states:
            next(states)
            asking = Asking(server, PROMPT, max_tokens=3000, model=str(plain_model))
            until(states, lambda state: state.requests)
            server.process.terminate()
            for _ in states:
                pass
            assert asking.is_alive()
        assert asking.result()["usage"]["completion_tokens"] == 3000
        assert server.process.wait(30) == 0
    assert "Traceback" not in server.log


def test_the_end_of_the_engine(plain_model: Path) -> None:
    with LocalServer({"model": str(plain_model)}) as server, server.http() as http, server.http() as other:
        engine = server.engine.llm_engine
        with watching(http) as states:
            next(states)
            engine.core.schedule = None  # type: ignore[assignment, method-assign]
            assert other.post("/v1/completions", json={"model": str(plain_model), "prompt": "a"}).status_code == 503
            for _ in states:
                pass
        refused = http.get(ROUTE)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"


def test_a_watcher_that_sent_a_body_and_leaves_half_is_noticed(server: LocalServer) -> None:
    """Though nobody reads the body, which is more than the connection reads ahead."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
        head = f"GET {ROUTE} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 300000\r\n\r\n"
        client.sendall(head.encode() + b"x" * 300_000)
        assert b"200" in client.recv(64)
        client.shutdown(socket.SHUT_WR)
        unwatched(server)
