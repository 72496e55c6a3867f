"""Pool, prefix index and scheduler through random lives, with a cache that knows what each slot should hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.config import SchedulerConfig
from quire.platform.execution.sequences import Sequences
from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex, block_key, root_key
from quire.platform.kv.swap import SwapSpace
from quire.platform.kv.windows import Footprint
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.sampling.results import Sampled, TopLogprobs
from quire.platform.scheduling.beam import BeamGroup
from quire.platform.scheduling.plan import StepPlan, StepResult
from quire.platform.scheduling.request import Request, SequenceState
from quire.platform.scheduling.scheduler import Scheduler
from quire.types import STATE

EOS = 0
VOCAB = 6


class RecordingRunner:
    """Instead of keys and values, each slot records the whole history that they would depend on.

    What it knows of sequences, the plans have said. windows: of each group of layers; a slot also records its group. A
    block of a group with states records the history that its state is behind.
    """

    def __init__(self, pool: BlockPool, faults: float = 0.0, windows: tuple[int, ...] = (0,)) -> None:
        self.sequences = Sequences()
        self.size = pool.block_size
        self.num_states = pool.num_states
        self.windows = windows
        self.faults = faults  # the share of draws that end in an error
        self.slots: dict[int, tuple] = {}
        self.states: dict[int, tuple] = {}
        self.hosts: dict[int, list[tuple]] = {}
        self.computed = 0  # tokens

    def execute(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        self.sequences.take(plan)
        scheduler.delivered(plan)
        self._swap(plan)
        self.computed += sum(chunk.length for chunk in plan.chunks)
        for source, target in plan.copies:
            for offset in range(self.size):
                self.slots[target * self.size + offset] = self.slots.get(source * self.size + offset, ())
            self.states[target] = self.states.get(source, ())
        live = {s.id: s for s in scheduler.sequences()}
        for chunk in plan.chunks:
            known, sequence = self.sequences[chunk.sequence_id], live[chunk.sequence_id]
            assert known.token_ids == sequence.token_ids and known.output_ids == sequence.output_ids
            blocks = list(scheduler.kv.blocks(sequence.id))
            assert list(known.block_ids) == blocks or (any(self.windows) and set(known.block_ids) >= set(blocks))
        assert len(self.sequences) <= len(live), "the worker remembers sequences that have ended"
        for chunk in plan.chunks:  # all writes come before all reads, as in a layer's forward pass
            history = live[chunk.sequence_id].token_ids
            for group, window in enumerate(self.windows):
                for position in range(chunk.start, chunk.end) if window != STATE else ():
                    self.slots[self._slot(chunk, position, group)] = group, tuple(history[: position + 1])
        for chunk in plan.chunks:
            history = live[chunk.sequence_id].token_ids
            for group, window in enumerate(self.windows):
                reads = range(max(0, chunk.start + 1 - window) if window else 0, chunk.end)
                for position in reads if window != STATE else ():
                    assert self.slots[self._slot(chunk, position, group)] == (group, tuple(history[: position + 1]))
        if STATE in self.windows:
            self._go_on_from_states(plan, live)
        sampled = tuple(tuple(self._sample(live[c.sequence_id], seed) for seed in c.draws) for c in plan.chunks)
        return StepResult(sampled, ((),) * len(plan.chunks))

    def _go_on_from_states(self, plan: StepPlan, live: dict[int, SequenceState]) -> None:
        """Each chunk reads the state in front of it and leaves some behind, in blocks that no other chunk looks at."""
        read, written = [], []
        for chunk in plan.chunks:
            history = live[chunk.sequence_id].token_ids
            blocks = self.sequences[chunk.sequence_id].block_ids[len(self.windows) - 1 :: len(self.windows)]
            if chunk.start:
                read.append(blocks[(chunk.start - 1) // self.size])
                assert self.states[read[-1]] == tuple(history[: chunk.start])
            own = {
                blocks[place]: min((place + 1) * self.size, chunk.end)
                for place in range(chunk.start // self.size, (chunk.end - 1) // self.size + 1)
                if blocks[place] >= 0
            }
            assert chunk.end in own.values() and all(block < self.num_states for block in own)
            written += [(block, tuple(history[:end])) for block, end in own.items()]
        changed = [block for block, _ in written]
        assert len(set(changed)) == len(changed)
        for chunk, block in zip([chunk for chunk in plan.chunks if chunk.start], read, strict=True):
            assert block not in changed or chunk.start % self.size, "another chunk's state is overwritten"
        assert len(set(read) & set(changed)) == sum(changed.count(block) for block in read)
        self.states.update(written)

    def _swap(self, plan: StepPlan) -> None:
        """What moves at once must not depend on any order: no block is written twice, none is read after that."""
        for moves in (plan.swap_out, plan.swap_in):
            assert len({target for _, target in moves}) == len(moves)
        for source, target in plan.swap_out:
            places = range(source * self.size, (source + 1) * self.size)
            self.hosts[target] = [self.states.get(source, ()), *(self.slots.get(place, ()) for place in places)]
        for source, target in plan.swap_in:
            self.states[target] = self.hosts[source][0]
            for offset, history in enumerate(self.hosts[source][1:]):
                self.slots[target * self.size + offset] = history

    def _slot(self, chunk, position: int, group: int) -> int:
        blocks = self.sequences[chunk.sequence_id].block_ids[group :: len(self.windows)]
        return blocks[position // self.size] * self.size + position % self.size

    def _sample(self, sequence: SequenceState, seed: int) -> Sampled:
        rng = random.Random(repr((seed, sequence.token_ids)))
        if rng.random() < self.faults:
            return Sampled(-1, error="fault")
        order = rng.sample(range(VOCAB), VOCAB)
        top = TopLogprobs(order[0], -1.0, 1, tuple(order), tuple(-1.0 - i for i in range(VOCAB)))
        return Sampled(order[0], top)


def make_request(name: str, prompt: list[int], n: int, max_tokens: int, width: int = 0) -> Request:
    greedy = {"temperature": 0.0} if n == 1 else {}
    request = Request(
        request_id=name,
        prompt=None,
        prompt_ids=prompt,
        params=SamplingParams(n=n, **greedy),
        max_tokens=max_tokens,
        seeds=tuple(range(n)),
        eos_ids=frozenset({EOS}),
        stop_ids=frozenset() if width else frozenset({EOS}),
        prefix_root=root_key(),
    )
    if width:
        request.beam = BeamGroup(BeamSearchParams(beam_width=width, max_tokens=max_tokens), max_tokens, request.eos_ids)
    return request


class Life(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, on a pool in which little more than one sequence fits."""

    windows: tuple[int, ...] = (0,)  # of the groups of layers
    num_states = 0

    @initialize(
        blocks=st.integers(8, 24),
        size=st.integers(1, 4),
        seqs=st.integers(1, 6),
        budget=st.integers(1, 16),
        cached=st.booleans(),
        faults=st.sampled_from([0.0, 0.05]),
        hosts=st.sampled_from([0, 5, 100]),
    )
    def start(self, blocks, size, seqs, budget, cached, faults, hosts):
        self.pool = BlockPool(blocks, size, PrefixIndex() if cached else None, self.num_states)
        self.swap = SwapSpace(hosts, size, self.windows)
        self.scheduler = Scheduler(SchedulerConfig(seqs, budget), KVManager(self.pool, self.swap, self.windows))
        self.runner = RecordingRunner(self.pool, faults, self.windows)
        self.requests: list[Request] = []

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 30),
        n=st.integers(1, 4),
        width=st.sampled_from([0, 0, 0, 2, 3]),
        output=st.integers(1, 12),
    )
    def arrive(self, family, length, n, width, output):
        room = Footprint(self.pool.num_blocks, self.pool.block_size, self.windows).longest(0)
        length = max(1, min(length, room - output))
        output = min(output, room - length + 1)
        prompt = [(family + i * i) % VOCAB for i in range(length)]
        request = make_request(str(len(self.requests)), prompt, 1 if width else n, output, width)
        self.requests.append(request)
        self.scheduler.add(request)

    @rule(steps=st.integers(1, 5))
    def step(self, steps):
        for _ in range(steps):
            self._step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        for sequence in data.draw(st.sampled_from(self.requests)).sequences:
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, "abort")

    @invariant()
    def tables_agree(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def _step(self):
        plan = self.scheduler.plan()
        config = self.scheduler.config
        assert len(plan.chunks) <= config.max_num_seqs
        assert sum(c.length for c in plan.chunks) <= config.max_num_batched_tokens
        assert bool(plan.chunks) == self.scheduler.has_work, "work waits, but nothing runs"
        self.scheduler.check_integrity()
        result = self.runner.execute(plan, self.scheduler)
        self.scheduler.commit(plan, result)
        self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.has_work:
            self._step()
            steps += 1
            assert steps < 20_000, "the engine does not come to an end"
        assert self.pool.num_owned == 0 and self.pool.num_free == self.pool.num_blocks
        assert self.pool.num_free_states == self.pool.num_states
        assert self.swap.num_free == self.swap.num_blocks
        for request in self.requests:
            self._check_finished(request)

    def _check_finished(self, request: Request):
        assert request.finished
        broken = any(s.finish_reason in ("abort", "error") for s in request.sequences)
        if request.beam is not None:
            if not broken:
                assert 1 <= len(request.beam.ended) <= request.beam.params.beam_width
            assert len(request.sequences) <= request.beam.params.beam_width, "dropped beams are remembered"
            return
        if not broken:
            assert len(request.sequences) == request.params.n
        for sequence in request.sequences:
            ended = sequence.output_ids[-1:] == [EOS]
            if sequence.finish_reason not in ("abort", "error"):
                assert sequence.finish_reason == ("stop" if ended else "length")
                assert ended or len(sequence.output_ids) == request.max_tokens


Life.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase


def run_alone(request: Request, blocks: int = 64) -> None:
    pool = BlockPool(blocks, 4)
    scheduler = Scheduler(SchedulerConfig(8, 64), KVManager(pool))
    runner = RecordingRunner(pool)
    scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))


def test_preemption_does_not_change_tokens():
    def crowd():
        return [make_request(str(i), [1 + i % 5] * (5 + i), 1 + i % 3, 20) for i in range(6)]

    pool = BlockPool(16, 4, PrefixIndex())
    scheduler, runner = Scheduler(SchedulerConfig(8, 16), KVManager(pool)), RecordingRunner(pool)
    together = crowd()
    for request in together:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))
    assert scheduler.num_preemptions > 0
    for request, alone in zip(together, crowd(), strict=True):
        run_alone(alone)
        assert [s.output_ids for s in request.sequences] == [s.output_ids for s in alone.sequences]


def test_the_oldest_is_served_first():
    pool = BlockPool(8, 4)
    scheduler = Scheduler(SchedulerConfig(4, 4), KVManager(pool))
    first, second = (make_request(n, [1] * 6, 1, 4) for n in "ab")
    for request in (first, second):
        scheduler.add(request)
    plan = scheduler.plan()
    assert [c.sequence_id for c in plan.chunks] == [first.sequences[0].id]
    assert [c.length for c in plan.chunks] == [4] and plan.chunks[0].draws == ()


def test_a_cached_prefix_is_not_computed_again():
    pool = BlockPool(32, 4, PrefixIndex())
    scheduler, runner = Scheduler(SchedulerConfig(4, 64), KVManager(pool)), RecordingRunner(pool)
    computed = []
    for name in "ab":
        request = make_request(name, [1, 2, 3, 4, 5, 1, 2, 3, 4], 1, 2)
        scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan()
            computed.append(sum(c.length for c in plan.chunks))
            scheduler.commit(plan, runner.execute(plan, scheduler))
    assert computed[0] == 9
    assert request.metrics.num_cached_tokens == 8


def test_keys_depend_on_salt_position_and_history():
    ids = [1, 2, 3, 4]
    keys = {
        block_key(root_key(), ids),
        block_key(root_key("tenant"), ids),
        block_key(root_key("None"), ids),
        block_key(root_key(None, 7), ids),
        block_key(block_key(root_key(), ids), ids),
        block_key(root_key(), [1, 2, 3, 5]),
    }
    assert len(keys) == 6


def test_cached_blocks_are_taken_last_and_least_recent_first():
    index = PrefixIndex()
    pool = BlockPool(4, 2, index)
    blocks = pool.allocate(4)
    for place, block in enumerate(blocks[:3]):
        index.publish(bytes([place]), block)
    pool.release(blocks[:1])
    pool.release(blocks[3:])
    pool.release(blocks[1:3])
    # The block without contents goes first, then the one released longest ago; a sequence's tail before its head.
    assert pool.allocate(4) == [blocks[3], blocks[0], blocks[2], blocks[1]]
    assert len(index) == 0


def test_integrity_check_sees_a_leak_and_a_double_release():
    pool = BlockPool(4, 2, PrefixIndex())
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check_integrity([])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_waste_in_allocated_blocks():
    """The workload of benchmarks/throughput.py, at the default block size: under 4 % of the slots hold nothing."""
    from quire.cli.workload import workload
    from quire.config import CacheConfig

    pool = BlockPool(4096, CacheConfig().block_size)
    scheduler, runner = Scheduler(SchedulerConfig(), KVManager(pool)), RecordingRunner(pool)
    for place, (prompt, output) in enumerate(workload()):
        request = make_request(str(place), prompt, 1, output)
        request.stop_ids = frozenset()
        scheduler.add(request)
    shares = []
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan, scheduler))
        slots = sum(len(scheduler.kv.blocks(s.id)) for s in scheduler.running) * pool.block_size
        if slots:
            shares.append(1 - sum(s.num_computed for s in scheduler.running) / slots)
    assert sum(shares) / len(shares) < 0.04
