"""Layers in several groups, some of which see a window only: pool, prefix index and scheduler through random lives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from quire.config import SchedulerConfig
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex
from quire.platform.kv.swap import SwapSpace
from quire.platform.kv.windows import Footprint
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler
from quire.types import STATE
from tests.platform.scheduling.test_bookkeeping import Life, RecordingRunner, make_request, run_alone

MIXED = (0, 6, 6)


class GroupLife(Life):
    """The lives of `Life`, with windows from one token to more than a sequence has."""

    @initialize(
        windows=st.sampled_from([(5,), (1,), (0, 4), (0, 3, 7), (0, 0, 5), (9, 2), (0, 100)]),
        blocks=st.integers(10, 40),
        size=st.integers(1, 4),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 16),
        cached=st.booleans(),
        faults=st.sampled_from([0.0, 0.05]),
        hosts=st.sampled_from([0, 8, 200]),
    )
    def start(self, windows, blocks, size, seqs, budget, cached, faults, hosts):
        self.windows = windows
        super().start(blocks, size, seqs, budget, cached, faults, hosts)


GroupLife.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGroupLife = GroupLife.TestCase


class StateLife(Life):
    """The lives of `Life`, with layers that have states; there is room for those of one sequence at least."""

    @initialize(
        windows=st.sampled_from([(0, STATE), (5, STATE), (0, 3, STATE)]),
        states=st.sampled_from([2, 3, 5, 20]),
        blocks=st.integers(10, 40),
        size=st.integers(1, 4),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 16),
        cached=st.booleans(),
        faults=st.sampled_from([0.0, 0.05]),
        hosts=st.sampled_from([0, 8, 200]),
    )
    def start(self, windows, states, blocks, size, seqs, budget, cached, faults, hosts):
        self.windows, self.num_states = windows, states
        super().start(blocks, size, seqs, budget, cached, faults, hosts)


StateLife.TestCase.settings = GroupLife.TestCase.settings
TestStateLife = StateLife.TestCase


def scene(
    blocks: int, windows: tuple[int, ...] = MIXED, budget: int = 64, hosts: int = 0
) -> tuple[Scheduler, RecordingRunner]:
    pool = BlockPool(blocks, 4, PrefixIndex())
    kv = KVManager(pool, SwapSpace(hosts, 4, windows), windows)
    return Scheduler(SchedulerConfig(4, budget), kv), RecordingRunner(pool, windows=windows)


def endless(name: str, prompt: list[int], n: int, max_tokens: int) -> Request:
    request = make_request(name, prompt, n, max_tokens)
    request.stop_ids = frozenset()
    return request


def run(scheduler: Scheduler, runner: RecordingRunner, *requests: Request) -> list[list[list[int]]]:
    for request in requests:
        scheduler.add(request)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))
        scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.kv.pool.num_owned == 0
    return [[sequence.output_ids for sequence in request.sequences] for request in requests]


def test_a_prompt_longer_than_the_pool_runs_in_windows():
    """300 tokens; the pool has slots for 200 of one group's."""
    scheduler, runner = scene(50, windows=(10, 20))
    request = endless("a", [1 + i % 5 for i in range(280)], 1, 20)
    assert Footprint(50, 4, (10, 20)).longest(300) >= 300
    (found,) = run(scheduler, runner, request)
    run_alone(alone := endless("a", request.prompt_ids, 1, 20), blocks=100)
    assert found == [alone.sequences[0].output_ids] and scheduler.num_preemptions == 0


def test_preemption_swap_and_forks_do_not_change_tokens():
    def crowd() -> list[Request]:
        return [endless(str(i), [1 + i % 5] * (9 + 3 * i), 1 + i % 3, 20) for i in range(6)]

    expected = []
    for request in crowd():
        run_alone(request)
        expected.append([sequence.output_ids for sequence in request.sequences])
    for hosts in (0, 500):
        scheduler, runner = scene(36, budget=16, hosts=hosts)
        assert run(scheduler, runner, *crowd()) == expected
        assert scheduler.num_preemptions > 0 and (scheduler.num_swaps > 0) is (hosts > 0)
        assert scheduler.kv.swap.num_free == hosts


def test_what_comes_back_from_main_memory_is_a_window_of_it():
    scheduler, runner = scene(40, hosts=40)
    request = endless("a", [1 + i % 5 for i in range(21)], 1, 9)
    scheduler.add(request)
    (sequence,) = request.sequences
    while sequence.num_computed != 26:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))
    scheduler.kv.forget_cached()
    scheduler._preempt(sequence)
    plan = scheduler.plan()
    # 26 tokens in 7 blocks; token 26 sees those from 21 on, in the last 2.
    assert len(plan.swap_out) == len(plan.swap_in) == 7 + 2 + 2
    assert [chunk.start for chunk in plan.chunks] == [26]
    scheduler.commit(plan, runner.execute(plan, scheduler))
    assert run(scheduler, runner)[:0] == []


def test_a_hit_needs_the_last_window_alone():
    scheduler, runner = scene(60)
    prompt = [1 + i % 5 for i in range(30)]
    run(scheduler, runner, endless("a", prompt, 1, 8))
    again = endless("b", prompt, 1, 1)
    run(scheduler, runner, again)
    assert again.metrics.num_cached_tokens == 28, "though the windows' blocks were given back long before"
    # The first blocks of a group with a window are of no use to that hit, and a full group's are.
    kv = scheduler.kv
    kv.open(10**6, again.prefix_root)
    found = kv.find_prefix(10**6, prompt, 29)
    assert kv.tables.places(found) == 7 and found.count(-1) == 2 * 5
    forgotten = kv.pool.index.block_of(kv.keys(10**6)[4])
    kv.pool.index.forget(forgotten)
    assert kv.tables.places(kv.find_prefix(10**6, prompt, 29)) == 4
    kv.close(10**6)


def test_a_hit_ends_where_some_window_is_missing():
    scheduler, runner = scene(60)
    prompt = [1 + i % 5 for i in range(30)]
    run(scheduler, runner, endless("a", prompt, 1, 8))
    kv = scheduler.kv
    kv.open(10**6, make_request("b", prompt, 1, 1).prefix_root)
    assert kv.tables.places(kv.find_prefix(10**6, prompt, 29)) == 7
    index, keys = kv.pool.index, kv.keys(10**6)
    column = {key: block for key, block in index._block.items() if key.startswith(keys[5]) and key != keys[5]}
    assert len(column) == 2, "a key of its own in each group with a window"
    index.forget(min(column.values()))
    assert kv.tables.places(kv.find_prefix(10**6, prompt, 29)) == 5
    kv.close(10**6)


def test_blocks_behind_a_window_are_given_back_while_a_request_runs():
    scheduler, runner = scene(200, budget=8)
    request = endless("a", [1 + i % 5 for i in range(90)], 1, 60)
    scheduler.add(request)
    (sequence,) = request.sequences
    most = []
    while scheduler.has_work:
        plan = scheduler.plan()
        held, places = len(scheduler.kv.blocks(sequence.id)), -(-plan.chunks[0].end // 4)
        most.append(held - places)
        scheduler.commit(plan, runner.execute(plan, scheduler))
    assert max(most) <= 2 * 4, "a chunk of 8 and the 5 tokens before it, in each of two groups"
    assert max(most[-50:]) <= 2 * 3
    assert Footprint(200, 4, MIXED).blocks(149) <= 38 + 2 * (50 // 2 + 2)


@pytest.mark.parametrize("windows", [(0,), (4,), (0, 5, 9), (0, 0, 3)])
def test_a_footprint_is_a_bound_and_is_reached(windows):
    footprint = Footprint(64, 4, windows)
    longest = footprint.longest(0)
    assert footprint.blocks(longest) <= 64
    if 0 in windows:
        assert footprint.blocks(longest + 1) > 64
    if windows == (0,):
        assert longest == footprint.most_at_once == 256
    else:
        assert footprint.longest(10_000) == (10_000 if windows == (4,) else longest)
        spans = [-(-(window + footprint.most_at_once - 1) // 4) for window in windows if window]
        assert sum(spans) <= 64 // 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda table: table.blocks.__setitem__(0, -1), "references|blocks behind"),
        (lambda table: table.firsts.__setitem__(1, 9), "blocks behind|given back"),
        (lambda table: table.blocks.pop(), "references|without a block"),
    ],
)
def test_integrity_check_sees_a_table_that_disagrees(spoil, message):
    scheduler, runner = scene(60)
    request = endless("a", [1 + i % 5 for i in range(30)], 1, 8)
    scheduler.add(request)
    for _ in range(3):
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))
    scheduler.check_integrity()
    spoil(scheduler.kv.tables._tables[request.sequences[0].id])
    with pytest.raises(AssertionError, match=message):
        scheduler.check_integrity()
