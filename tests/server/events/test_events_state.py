"""GET /v1/engine/events against an engine whose steps are known: blocks, requests, steps, adapters, rates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import __version__
from tests.server.api_server import LocalServer
from tests.server.events.helpers import Asking, name_of, stepping, until, watching

BLOCKS = 64
PROMPT = [60, 61, 62, 63, 64, 65] * 4  # three blocks of 8


@pytest.fixture(scope="module")
def server(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model), "num_gpu_blocks_override": BLOCKS}) as server:
        yield server


@pytest.fixture
def fresh(server: LocalServer) -> LocalServer:
    """With nothing in its cache."""
    server.until_idle()
    server.engine.llm_engine.scheduler.forget_cached()
    return server


def test_an_idle_engine(fresh: LocalServer) -> None:
    with fresh.http() as http, watching(http) as states:
        first, second = next(states), next(states)
    scheduler = fresh.engine.llm_engine.config.scheduler
    assert first.engine.model_dump() == {
        "model": name_of(fresh),
        "dtype": "float32",
        "device": "cpu",
        "version": __version__,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_batched_tokens": scheduler.max_num_batched_tokens,
    }
    assert [pool.name for pool in first.pools] == ["kv"] and first.kv.block_size == 8
    assert first.kv.map == [[BLOCKS, 0, 0]] and not first.kv.swap_total
    assert (first.requests, first.more_requests, first.steps, first.adapters) == ([], 0, [], [])
    assert not first.sleeping and second.time > first.time
    assert set(first.rates.model_dump().values()) == {None}
    assert second.rates.output_tokens_per_second == 0 and second.rates.cache_hit_rate is None


def test_a_request_from_its_arrival_to_its_end(fresh: LocalServer) -> None:
    with fresh.http() as http, stepping(fresh) as step, watching(http) as states:
        asking = Asking(fresh, PROMPT, max_tokens=10)
        waits = until(states, lambda state: state.requests)
        (row,) = waits.requests
        number = row.number
        assert (row.state, row.adapter, row.prompt_tokens, row.computed_tokens, row.output_tokens, row.blocks) == (
            "waiting", None, len(PROMPT), 0, 0, 0,
        )  # fmt: skip
        assert waits.kv.owned == 0 and waits.steps == []

        step(1)
        prefilled = until(states, lambda state: state.steps)
        (row,) = prefilled.requests
        assert (row.number, row.state, row.computed_tokens, row.output_tokens, row.sequences, row.blocks) == (
            number, "running", 24, 1, 1, 3,
        )  # fmt: skip
        assert sorted(prefilled.kv.blocks())[-3:] == [(number, 1)] * 3 and prefilled.kv.owned == 3
        (made,) = prefilled.steps
        assert (made.prefill_tokens, made.decode_tokens, made.sequences, made.media, made.adapters) == (24, 0, 1, 0, 0)
        assert 0 < made.milliseconds < 60_000 and waits.time <= made.time <= prefilled.time

        step(2)
        decoded = until(states, lambda state: state.requests[0].output_tokens == 3)
        assert (decoded.requests[0].computed_tokens, decoded.requests[0].blocks, decoded.kv.owned) == (26, 4, 4)
        assert decoded.rates.output_tokens_per_second and decoded.rates.prompt_tokens_per_second

        step(100)
        over = until(states, lambda state: not state.requests)
        # 24 of the prompt and 9 of the answer were computed: four full blocks can be found again.
        assert (over.kv.owned, over.kv.cached, over.kv.free) == (0, 4, BLOCKS - 4)
        assert over.rates.requests_per_second
    assert asking.result()["usage"]["completion_tokens"] == 10


def test_each_step_is_told_once(fresh: LocalServer) -> None:
    with fresh.http() as http, stepping(fresh) as step, watching(http) as states:
        asking = Asking(fresh, PROMPT, max_tokens=12)
        told = []
        step(100)
        while len(told) < 12:
            told += next(states).steps
        told += next(states).steps
    asking.result()
    assert [one.prefill_tokens for one in told] == [24] + [0] * 11
    assert [one.decode_tokens for one in told] == [0] + [1] * 11
    assert [one.time for one in told] == sorted(one.time for one in told)


def test_shared_blocks_and_their_heirs(fresh: LocalServer) -> None:
    """Two requests begin alike: the second finds two of the first's blocks, and they are its own when that has gone."""
    with fresh.http() as http, stepping(fresh) as step, watching(http) as states:
        first = Asking(fresh, PROMPT, max_tokens=4)
        until(states, lambda state: state.requests)
        step(1)
        until(states, lambda state: state.requests[0].state == "running")
        second = Asking(fresh, PROMPT, max_tokens=9)
        until(states, lambda state: len(state.requests) == 2)
        step(1)
        both = until(states, lambda state: all(row.state == "running" for row in state.requests))
        older, newer = both.requests
        assert older.number < newer.number and (older.cached_tokens, newer.cached_tokens) == (0, 16)
        assert newer.computed_tokens == 24
        blocks = both.kv.blocks()
        assert blocks.count((older.number, 2)) == 2 and blocks.count((newer.number, 2)) == 0
        assert both.kv.owned == older.blocks + newer.blocks - 2
        assert both.rates.cache_hit_rate == pytest.approx(16 / 48, abs=1e-3)
        step(2)
        alone = until(states, lambda state: len(state.requests) == 1)
        assert alone.requests[0].number == newer.number
        assert alone.kv.blocks().count((newer.number, 1)) == alone.requests[0].blocks == alone.kv.owned
        step(100)
        until(states, lambda state: not state.requests)
    assert first.result()["choices"][0]["text"] == second.result()["choices"][0]["text"][:4]


def test_a_client_that_leaves(fresh: LocalServer) -> None:
    with fresh.http() as http, stepping(fresh) as step, watching(http) as states:
        asking = Asking(fresh, PROMPT, max_tokens=100, stream=True)
        until(states, lambda state: state.requests)
        step(3)
        until(states, lambda state: state.kv.owned)
        asking.leave()
        step(1)  # whose token it goes away with
        asking.join(30)
        assert until(states, lambda state: not state.requests).kv.owned == 0


def test_several_answers_to_one_prompt(fresh: LocalServer) -> None:
    """One row, and each block once, though three sequences hold it."""
    with fresh.http() as http, stepping(fresh) as step, watching(http) as states:
        asking = Asking(fresh, PROMPT, max_tokens=9, n=3, temperature=1, seed=3)
        until(states, lambda state: state.requests)
        step(3)
        forked = until(states, lambda state: state.requests[0].sequences == 3 and state.requests[0].output_tokens >= 6)
        (row,) = forked.requests
        assert row.blocks == forked.kv.owned == 6  # three of the prompt's, and one more each
        assert forked.kv.blocks().count((row.number, 3)) == 3
        step(100)
        until(states, lambda state: not state.requests)
    assert len(asking.result()["choices"]) == 3
