"""What these tests share: events as they are to look, a reader of them, and an engine that steps when it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.server.api_server import LocalServer, ServerProcess

ROUTE = "/v1/engine/events"
PATIENCE = 180.0  # seconds


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Facts(_Strict):
    model: str
    dtype: str
    device: str
    version: str
    max_num_seqs: int
    max_batched_tokens: int


class Pool(_Strict):
    name: Literal["kv", "states"]
    block_size: int | None
    total: int
    free: int = Field(ge=0)
    cached: int = Field(ge=0)
    owned: int = Field(ge=0)
    swapped: int = Field(ge=0)
    swap_total: int = Field(ge=0)
    cell: int = Field(ge=1)
    map: list[list[int]]

    def blocks(self) -> list[tuple[int, int]]:
        """(owner, shared) of each block."""
        return [(owner, shared) for count, owner, shared in self.map for _ in range(count)]


class Row(_Strict):
    number: int = Field(ge=2)
    state: Literal["running", "waiting", "swapped", "images", "adapter"]
    adapter: str | None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    sequences: int
    blocks: int
    seconds: float = Field(ge=0)


class Step(_Strict):
    time: float
    milliseconds: float
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    media: int
    adapters: int


class AdapterRow(_Strict):
    name: str
    tier: Literal["device", "host", "disk"]
    bytes: int
    rank: int | None
    requests: int
    pinned: bool


class RateRow(_Strict):
    prompt_tokens_per_second: float | None
    output_tokens_per_second: float | None
    requests_per_second: float | None
    cache_hit_rate: float | None


class State(_Strict):
    """An event, in which all numbers must agree."""

    time: float
    sleeping: bool
    engine: Facts
    pools: list[Pool]
    requests: list[Row] = Field(max_length=256)
    more_requests: int = Field(ge=0)
    steps: list[Step] = Field(max_length=64)
    adapters: list[AdapterRow] = Field(max_length=256)
    more_adapters: int = Field(ge=0)
    rates: RateRow

    @property
    def kv(self) -> Pool:
        return self.pools[0]

    def check(self) -> None:
        for pool in self.pools:
            blocks = pool.blocks()
            assert len(blocks) == pool.total == pool.free + pool.cached + pool.owned
            assert all(count > 0 for count, _, _ in pool.map)
            assert all(one[1:] != two[1:] for one, two in zip(pool.map, pool.map[1:], strict=False))
            if pool.cell == 1:
                owners = [owner for owner, _ in blocks]
                assert (owners.count(0), owners.count(1)) == (pool.free, pool.cached)
                assert all((shared > 0) == (owner > 1) for owner, shared in blocks)
        numbers = [row.number for row in self.requests]
        assert len(set(numbers)) == len(numbers)
        if not self.more_requests and self.kv.cell == 1:
            assert {owner for owner, _ in self.kv.blocks()} <= {0, 1, *numbers}


def read(lines: Iterator[str]) -> Iterator[State]:
    """The states of an answer's lines, each checked; other lines are comments, names and ends of events."""
    before = ""
    for line in lines:
        if line.startswith("data: "):
            assert before == "event: state", before
            state = State.model_validate(json.loads(line.removeprefix("data: ")))
            state.check()
            yield state
        else:
            assert line in ("", "event: state") or line.startswith(":"), line
        before = line


@contextmanager
def watching(http: Any, rate: float = 10, **options: Any) -> Iterator[Iterator[State]]:
    """States, as they come."""
    with http.stream("GET", f"{ROUTE}?rate={rate}", **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield read(answer.iter_lines())


def until(states: Iterator[State], condition: Callable[[State], Any]) -> State:
    """The first state of which this holds."""
    end = time.monotonic() + PATIENCE
    for state in states:
        if condition(state):
            return state
        assert time.monotonic() < end, state
    raise AssertionError("the events have ended")


class Steps:
    """Lets an engine make so many steps; in between, and asked nothing, it is there and computes nothing."""

    def __init__(self, server: LocalServer) -> None:
        self._tickets = threading.Semaphore(0)
        self._engine = server.engine.llm_engine
        self._real = self._engine.step

    def __call__(self, count: int) -> None:
        self._tickets.release(count)

    def step(self) -> list[Any]:
        if self._tickets.acquire(timeout=0.002):
            return self._real()
        return []


@contextmanager
def stepping(server: LocalServer) -> Iterator[Steps]:
    """The engine steps when it is told to, until the end of this."""
    engine = server.engine.llm_engine
    steps = Steps(server)
    engine.step = steps.step  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.step


class Asking(threading.Thread):
    """A request in a thread of its own. prompt: None in conversations. The base model's, unless one is named."""

    def __init__(
        self, server: LocalServer | ServerProcess, prompt: Any, path: str = "/v1/completions", **fields: Any
    ) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._body = {"ignore_eos": True, "temperature": 0, **fields}
        if prompt is not None:
            self._body["prompt"] = prompt
        if isinstance(server, LocalServer):
            self._body.setdefault("model", name_of(server))
        self._client = server.http()
        self.parts: list[bytes] = []
        self.status = 0
        self._leaves = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self._client.stream("POST", self._path, json=self._body) as answer:
                for part in answer.iter_bytes():
                    self.parts.append(part)
                    if self._leaves.is_set():
                        return
                self.status = answer.status_code
        except Exception as error:
            self.parts.append(repr(error).encode())

    def leave(self) -> None:
        """Go away with the next that comes."""
        self._leaves.set()

    def result(self) -> Any:
        """The answer's body."""
        self.join(PATIENCE)
        assert self.status == 200, self.parts
        return json.loads(b"".join(self.parts))


def name_of(server: LocalServer) -> str:
    return str(server.app.state.context.served.names[0])
