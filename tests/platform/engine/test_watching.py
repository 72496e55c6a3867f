"""Snapshots of an engine against its own tables, after every step of crowds of every kind; and steps written down."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.watching import steps
from quire.platform.engine.watching.block_map import CACHED, FREE, MOST_RUNS, BlockMap, block_maps
from quire.platform.engine.watching.snapshot import FIRST_NUMBER, EngineSnapshot, take_snapshot
from quire.platform.engine.watching.steps import StepRecorder
from quire.platform.execution import worker
from quire.platform.sampling.params import BeamSearchParams
from tests.models.tiny import build
from tests.platform.engine.parity import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = prompts(97)
KINDS = {  # tiny models of tests/models, by their architecture and variant
    "plain": ("LlamaForCausalLM", "gqa"),
    "windows": ("Gemma2ForCausalLM", "as_published"),
    "states": ("FalconH1ForCausalLM", "as_published"),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def get(kind: str) -> str:
        if kind not in made:
            made[kind] = str(build(*KINDS[kind], tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get


def engine_of(path: str, **settings: Any) -> LLMEngine:
    llm = LLM(path, skip_tokenizer_init=True, **{"debug": True, "block_size": 4, **settings})
    llm.llm_engine.recorder = StepRecorder()
    return llm.llm_engine


def snapshots(engine: LLMEngine) -> Iterator[EngineSnapshot]:
    """One before each step, and after the last."""
    recorder = engine.recorder
    assert recorder is not None
    while engine.has_unfinished_requests():
        yield take_snapshot(engine, recorder)
        engine.step()
    yield take_snapshot(engine, recorder)


def add_crowd(engine: LLMEngine, beams: bool = True) -> None:
    for place, prompt in enumerate(BATCH):
        params: Any = SamplingParams(
            temperature=0.8, seed=place, max_tokens=10 + place % 5, n=1 + place % 3, ignore_eos=True
        )
        if beams and place % 5 == 4:
            params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
        engine.add_request(f"secret-{place}", {"prompt_token_ids": prompt}, params)


def check_map(engine: LLMEngine, snapshot: EngineSnapshot) -> None:
    """Each block's owner and sharers, asked of the tables one by one."""
    scheduler = engine.scheduler
    pool, kv = scheduler.kv.pool, scheduler.kv
    holders: dict[int, list[Any]] = {}
    for sequence in scheduler.running:
        for block in kv.blocks(sequence.id):
            holders.setdefault(block, []).append(sequence.request)
    own, states = block_maps(snapshot)
    shown = [(o, s) for part in (states, own) if part for count, o, s in part.runs for _ in range(count)]
    expected = []
    for block in range(pool.num_states + pool.num_blocks):
        found = pool.index is not None and pool.index.holds(block)
        oldest = min((request.arrival for request in holders.get(block, ())), default=None)
        owner = (CACHED if found else FREE) if oldest is None else oldest + FIRST_NUMBER
        expected.append((owner, len(holders.get(block, ()))))
    assert shown == expected
    for part, first, total in ((states, 0, pool.num_states), (own, pool.num_states, pool.num_blocks)):
        if part is not None:
            owners = Counter(min(owner, 2) for owner, _ in expected[first : first + total])
            assert (part.free, part.cached, part.owned) == (owners[FREE], owners[CACHED], owners[2])
    assert (states is None) == (pool.num_states == 0)


def check_rows(engine: LLMEngine, snapshot: EngineSnapshot) -> None:
    waiting = [request.arrival for request in engine.core.requests.values()]
    assert sorted(row.number - FIRST_NUMBER for row in snapshot.requests) == sorted(waiting)
    assert snapshot.more_requests == 0
    by_number = {request.arrival + FIRST_NUMBER: request for request in engine.core.requests.values()}
    for row in snapshot.requests:
        request = by_number[row.number]
        running = any(sequence.running for sequence in request.sequences)
        assert (row.state == "running") == running and row.prompt_tokens == len(request.prompt_ids)
        assert row.computed_tokens == max(sequence.num_computed for sequence in request.sequences)
        assert row.output_tokens == sum(len(sequence.output_ids) for sequence in request.sequences)
    states = [row.state == "running" for row in snapshot.requests]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("plain", {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 13}),
        ("plain", {"num_gpu_blocks_override": 400, "enable_prefix_caching": False}),
        ("windows", {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 13}),
        ("states", {"max_num_batched_tokens": 64}),
    ],
)
def test_after_every_step_of_a_crowd(path_of: Callable[[str], str], kind: str, settings: dict[str, Any]) -> None:
    engine = engine_of(path_of(kind), **settings)
    for _ in range(2):  # the second time, much is found in the cache
        add_crowd(engine)
        shared = 0
        for snapshot in snapshots(engine):
            check_map(engine, snapshot)
            check_rows(engine, snapshot)
            shared = max([shared, *snapshot.references])
            assert snapshot.counts.prompt_tokens == engine.scheduler.prompt_tokens
        assert shared >= 3
        assert snapshot.tables == [] and snapshot.requests == [] and set(snapshot.references) == {0}
    assert snapshot.counts.ended_requests == 2 * len(BATCH)
    assert bool(snapshot.findable) == settings.get("enable_prefix_caching", True)


def test_swapped_requests(path_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: 200)
    engine = engine_of(path_of("plain"), num_gpu_blocks_override=40)
    add_crowd(engine, beams=False)
    seen = 0
    for snapshot in snapshots(engine):
        check_map(engine, snapshot)
        swap = engine.scheduler.kv.swap
        kept = {s.request.arrival + FIRST_NUMBER for s in engine.scheduler.waiting if swap.tokens_of(s.id)}
        told = {row.number for row in snapshot.requests if row.state == "swapped"}
        running = {row.number for row in snapshot.requests if row.state == "running"}
        assert told == kept - running and (snapshot.swapped > 0) == bool(kept)
        seen += len(told)
    assert seen and snapshot.swapped == 0


def test_it_is_a_copy_of_numbers(path_of: Callable[[str], str]) -> None:
    """What happens afterwards does not change it; and no token and no name of a request is in it."""
    engine = engine_of(path_of("plain"), num_gpu_blocks_override=64)
    add_crowd(engine, beams=False)
    taken = snapshots(engine)
    for _ in range(6):
        snapshot = next(taken)
    before = pickle.dumps(snapshot)
    for _ in taken:
        pass
    assert pickle.dumps(snapshot) == before and b"secret" not in before
    prompt = BATCH[-1]
    assert len(prompt) > 5 and str(prompt[:5])[1:-1] not in repr(snapshot)


# -- steps -----------------------------------------------------------------------------------------------------------


def test_steps_add_up(path_of: Callable[[str], str]) -> None:
    """Every token of prompts and answers is computed once, the last of each answer never."""
    engine = engine_of(path_of("plain"), num_gpu_blocks_override=400, enable_prefix_caching=False,
                       max_num_batched_tokens=13)  # fmt: skip
    for place, prompt in enumerate(BATCH):
        engine.add_request(str(place), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=5, ignore_eos=True))
    made: dict[int, steps.StepRecord] = {}
    for snapshot in snapshots(engine):
        made.update((one.number, one) for one in snapshot.steps)
        assert len(snapshot.steps) <= 64
    assert list(made) == list(range(1, len(made) + 1))
    assert sum(one.prompt_tokens for one in made.values()) == sum(map(len, BATCH))
    assert sum(one.answer_tokens for one in made.values()) == 4 * len(BATCH)
    assert all(one.prompt_tokens + one.answer_tokens <= 13 and one.seconds > 0 for one in made.values())
    assert all(one.media == one.adapters == 0 and one.sequences > 0 for one in made.values())


def test_only_the_last_ones_are_kept(path_of: Callable[[str], str]) -> None:
    engine = engine_of(path_of("plain"))
    engine.add_request("a", {"prompt_token_ids": BATCH[0]}, SamplingParams(max_tokens=80, ignore_eos=True))
    *_, last = snapshots(engine)
    assert [one.number for one in last.steps] == list(range(17, 81))


# -- large pools -----------------------------------------------------------------------------------------------------


def spread(path: str, blocks: int, held: Callable[[int], int]) -> EngineSnapshot:
    """A snapshot of a pool of so many blocks, of which each is held by so many sequences of one request."""
    engine = engine_of(path)
    assert engine.recorder is not None
    references = [held(block) for block in range(blocks)]
    table = [block for block, count in enumerate(references) if count]
    return replace(
        take_snapshot(engine, engine.recorder), num_blocks=blocks, references=references, findable=[],
        num_free=references.count(0), tables=[(7, table)],
    )  # fmt: skip


def total(part: BlockMap) -> int:
    return sum(count for count, _, _ in part.runs)


def test_maps_of_large_pools_are_bounded(path_of: Callable[[str], str]) -> None:
    path = path_of("plain")
    fine, _ = block_maps(spread(path, MOST_RUNS, lambda block: block % 2))
    assert fine.cell == 1 and len(fine.runs) == MOST_RUNS
    # Of every four blocks three are held: whatever is seen as one, is seen as held.
    coarse, _ = block_maps(spread(path, 100_001, lambda block: int(block % 4 != 0)))
    assert coarse.cell == 64 and coarse.runs == [(100_001, 7, 1)] and total(coarse) == 100_001
    assert (coarse.free, coarse.cached, coarse.owned) == (25_001, 0, 75_000)  # exact nevertheless
    # The first half is mostly free, the second mostly held by two.
    halves, _ = block_maps(spread(path, 65_536, lambda block: 2 * int((block % 3 == 0) == (block < 32_768))))
    assert halves.cell == 32 and halves.runs == [(32_768, FREE, 0), (32_768, 7, 2)]
    # More sequences than a byte can count.
    many, _ = block_maps(spread(path, 10, lambda block: 300 if block == 3 else 0))
    assert many.runs == [(3, FREE, 0), (1, 7, 300), (6, FREE, 0)]


def test_a_pool_that_is_one_long_run(path_of: Callable[[str], str]) -> None:
    free, states = block_maps(spread(path_of("plain"), 100_000, lambda block: 0))
    assert free.runs == [(100_000, FREE, 0)] and free.cell == 1 and states is None


def test_nobody_watches_unless_somebody_does(tiny_path: Path) -> None:
    assert LLM(str(tiny_path)).llm_engine.recorder is None
