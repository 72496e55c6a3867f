"""The account of blocks in main memory, without a model; and the tensors that they are copied to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire.config import SchedulerConfig
from quire.platform.execution import host_cache
from quire.platform.execution.host_cache import HostCache
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex
from quire.platform.kv.swap import SwapSpace
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler
from quire.types import KVCache
from tests.platform.scheduling.test_bookkeeping import RecordingRunner, make_request, run_alone

pytestmark = pytest.mark.usefixtures("one_thread")


def scene(blocks: int = 8, hosts: int = 8) -> tuple[Scheduler, RecordingRunner]:
    pool = BlockPool(blocks, 4, PrefixIndex())
    return Scheduler(SchedulerConfig(4, 64), KVManager(pool, SwapSpace(hosts, 4))), RecordingRunner(pool)


def endless(name: str, prompt: list[int], max_tokens: int) -> Request:
    request = make_request(name, prompt, 1, max_tokens)
    request.stop_ids = frozenset()
    return request


def step(scheduler: Scheduler, runner: RecordingRunner) -> Any:
    plan = scheduler.plan()
    scheduler.commit(plan, runner.execute(plan, scheduler))
    scheduler.check_integrity()
    return plan


def preempted(scheduler: Scheduler, runner: RecordingRunner, first: Request, second: Request) -> Any:
    """Run both until the second is preempted; return the plan that does so."""
    for request in (first, second):
        scheduler.add(request)
    while not scheduler.num_preemptions:
        plan = step(scheduler, runner)
    return plan


def test_a_sequence_goes_on_where_it_was():
    scheduler, runner = scene()
    first, second = endless("a", [1] * 14, 6), endless("b", [2] * 14, 6)
    out = preempted(scheduler, runner, first, second)
    computed = scheduler.kv.swap.tokens_of(second.sequences[0].id)
    assert [host for _, host in out.swap_out] == list(range(4 + (computed > 16)))
    while second.sequences[0] in scheduler.waiting:
        back = step(scheduler, runner)
    (chunk,) = back.chunks
    assert chunk.start == computed
    # The blocks that were not needed meanwhile are still the pool's to find; the rest comes back, and can be found too.
    found = len(out.swap_out) - len(back.swap_in)
    assert [host for host, _ in back.swap_in] == list(range(found, len(out.swap_out)))
    assert scheduler.kv.prefix_hits == 4 * found
    index, keys = scheduler.kv.pool.index, scheduler.kv.keys(second.sequences[0].id)
    assert index is not None and index.find(keys[: computed // 4]) == list(chunk.block_ids[: computed // 4])
    while scheduler.has_work:
        step(scheduler, runner)
    assert runner.computed == 2 * (14 + 6 - 1)
    assert scheduler.kv.swap.num_free == scheduler.kv.swap.num_blocks


def test_what_the_prefix_cache_still_has_need_not_come_back():
    scheduler, runner = scene()
    request = endless("a", [1] * 11, 9)
    scheduler.add(request)
    (sequence,) = request.sequences
    while sequence.num_computed != 12:
        step(scheduler, runner)
    scheduler._preempt(sequence)
    assert scheduler.kv.swap.tokens_of(sequence.id) == 12 and scheduler.num_swaps == 1
    plan = step(scheduler, runner)
    assert len(plan.swap_out) == 3 and not plan.swap_in
    assert [chunk.start for chunk in plan.chunks] == [12] and scheduler.kv.prefix_hits == 12
    assert scheduler.kv.swap.num_free == scheduler.kv.swap.num_blocks
    while scheduler.has_work:
        step(scheduler, runner)
    alone = endless("a", [1] * 11, 9)
    run_alone(alone)
    assert sequence.output_ids == alone.sequences[0].output_ids


def test_a_sequence_without_room_is_computed_anew():
    scheduler, runner = scene(hosts=3)
    first, second = endless("a", [1] * 14, 6), endless("b", [2] * 14, 6)
    out = preempted(scheduler, runner, first, second)
    assert not out.swap_out and scheduler.num_swaps == 0
    while scheduler.has_work:
        assert not step(scheduler, runner).swap_in


def test_the_last_token_is_waited_for_and_not_saved():
    """A sequence that will have ended when the running step is done needs its blocks no more."""
    scheduler, _ = scene()
    request = endless("a", [1] * 5, 1)
    scheduler.add(request)
    (sequence,) = request.sequences
    scheduler.advance_early(scheduler.plan())
    assert sequence.last_pending and scheduler.kv.blocks(sequence.id)
    scheduler._preempt(sequence)
    assert not scheduler.num_swaps and not scheduler.kv.swap.tokens_of(sequence.id)


def test_a_block_is_written_once_a_plan():
    """What a plan reads or gives up is free for the plans after it."""
    swap = SwapSpace(2, 4)
    one, other = 1, 2
    assert swap.save(one, [5, 6], 7) and not swap.save(other, [7], 3)
    swap.fetch(one, [5, 6], 1)
    assert not swap.save(other, [7], 3)
    assert swap.take_moves() == ([(5, 0), (6, 1)], [(1, 6)])
    swap.begin_plan()
    assert swap.save(other, [7], 3) and swap.take_moves() == ([(7, 0)], [])
    with pytest.raises(AssertionError, match="does not wait"):
        swap.check_integrity({})
    swap.drop(other)
    swap.check_integrity({})
    swap._spent.pop()
    with pytest.raises(AssertionError, match="a block is lost"):
        swap.check_integrity({})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 2, 100])
def test_blocks_come_back_as_they_were(monkeypatch, dtype, piece):
    shape = (12, 2, 4, 6)
    monkeypatch.setattr(host_cache, "_PIECE_BYTES", piece * 2 * 3 * 2 * 4 * 6 * dtype.itemsize)
    caches = [KVCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(3)]
    before = [tensor.clone() for cache in caches for tensor in (cache.keys, cache.values)]
    store = HostCache(PoolBlocks(caches))
    rng = random.Random(piece)
    hosts, targets = rng.sample(range(9), 7), rng.sample(range(12), 7)
    store.save(list(zip(range(7), hosts, strict=True)))
    assert len(store._pieces) == max(hosts) // piece + 1
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    store.fetch(list(zip(hosts, targets, strict=True)))
    for cache, (keys, values) in zip(caches, zip(before[::2], before[1::2], strict=True), strict=True):
        assert torch.equal(cache.keys[targets], keys[:7]) and torch.equal(cache.values[targets], values[:7])
        assert int(cache.keys.isnan().sum()) == 5 * 2 * 4 * 6
