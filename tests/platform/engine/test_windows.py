"""Layers with a window, which keep its blocks alone: promise 1 and parity, with all that may happen to blocks."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ContextLengthError
from quire.platform.execution import host_cache, worker
from quire.platform.sampling.params import BeamSearchParams
from quire.types import KVSpec
from tests.platform import windowed
from tests.platform.engine.parity import check_greedy
from tests.platform.engine.test_promise import REQUESTS, answers, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = list(range(REQUESTS))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, torch.dtype], str]]:
    """The folder of a checkpoint of a kind and dtype."""
    site = str(windowed.install(tmp_path_factory.mktemp("site")))
    sys.path.insert(0, site)  # a worker's process has the path too
    made: dict[tuple[str, torch.dtype], str] = {}

    def path(kind: str, dtype: torch.dtype = torch.float32) -> str:
        if (kind, dtype) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            windowed.make(folder, kind, dtype)
            made[kind, dtype] = str(folder)
        return made[kind, dtype]

    yield path
    sys.path.remove(site)


@pytest.fixture(scope="module")
def alone(paths: Any) -> Callable[..., dict[int, tuple]]:
    """What each request gives in an engine that keeps whatever it has."""
    known: dict[Any, dict[int, tuple]] = {}

    def of(kind: str, dtype: torch.dtype = torch.float32) -> dict[int, tuple]:
        if (kind, dtype) not in known:
            llm = LLM(paths(kind, dtype), enable_prefix_caching=False, max_num_batched_tokens=512)
            known[kind, dtype] = {i: answers(llm, [i])[i] for i in SOME}
        return known[kind, dtype]

    return of


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the engines of a test so many blocks in main memory, in small pieces."""

    def give(count: int) -> None:
        monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: count)
        monkeypatch.setattr(host_cache, "_PIECE_BYTES", 30_000)

    return give


def groups(llm: LLM) -> list[int]:
    return [cache.group for cache in llm.llm_engine.executor.runner.caches]


# -- the promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("mixed", 13),
        ("uniform", 2048),
        *[
            pytest.param(kind, budget, marks=pytest.mark.slow)
            for kind in windowed.LAYERS
            for budget in (5, 13, 2048)
            if (kind, budget) not in (("mixed", 13), ("uniform", 2048))
        ],
    ],
)
def test_a_crowd_and_any_chunking(paths, alone, kind, budget):
    llm = LLM(paths(kind), max_num_batched_tokens=budget, debug=True)
    for _ in range(2):  # with prefix hits, then
        assert answers(llm, SOME) == alone(kind)
    assert llm.llm_engine.scheduler.kv.prefix_hits > 0
    assert groups(llm) == {"mixed": [1, 1, 0, 2, 2, 0], "uniform": [0, 0], "odd": [0, 1, 2]}[kind]


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [
        ("mixed", 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mixed", 1), ("uniform", 4), ("odd", 16))),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_preemption(paths, alone, hosts, kind, block_size, swapped):
    if swapped:
        hosts(2000)
    blocks = (60 if kind == "uniform" else 120) // block_size
    llm = LLM(paths(kind), block_size=block_size, num_gpu_blocks_override=blocks, debug=True)
    assert answers(llm, SOME) == alone(kind)
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.num_swaps == (scheduler.num_preemptions if swapped else 0)
    assert scheduler.kv.swap.num_free == scheduler.kv.swap.num_blocks
    assert llm.llm_engine.pool.num_blocks == blocks * len(set(groups(llm)))


@pytest.mark.slow
def test_bfloat16(paths, alone):
    llm = LLM(paths("mixed", torch.bfloat16), max_num_batched_tokens=40, num_gpu_blocks_override=16, debug=True)
    assert answers(llm, SOME) == alone("mixed", torch.bfloat16)
    assert llm.llm_engine.scheduler.num_preemptions > 0


def test_forks_and_beams(paths, hosts):
    params = [SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=12 + i, logprobs=2) for i in range(6)]
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    batch = [{"prompt_token_ids": ids} for ids in prompts(6)]

    def run(llm: LLM) -> list[Any]:
        outputs = llm.generate(batch, params, use_tqdm=False)
        found = [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]
        searched = llm.beam_search([ids["prompt_token_ids"] for ids in batch], beams)
        llm.llm_engine.check_integrity()
        assert llm.llm_engine.pool.num_owned == 0
        return [found, [[(beam.tokens, beam.cum_logprob) for beam in one.sequences] for one in searched]]

    expected = run(LLM(paths("mixed")))
    for count in (0, 300):
        hosts(count)
        llm = LLM(paths("mixed"), debug=True, max_num_batched_tokens=40, block_size=4, num_gpu_blocks_override=28)
        assert run(llm) == expected
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert (llm.llm_engine.scheduler.num_swaps > 0) is (count > 0)


@pytest.mark.slow
def test_another_process(paths, alone):
    llm = LLM(paths("mixed"), executor="process", num_gpu_blocks_override=18, max_num_batched_tokens=40, debug=True)
    for _ in range(2):
        assert answers(llm, SOME) == alone("mixed")
    assert llm.llm_engine.scheduler.num_preemptions > 0
    llm.llm_engine.close()


# -- transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixed", "uniform"])
def test_transformers(paths, kind, tmp_path):  # paths: the class is installed
    """Answers of 48 tokens, which leave the window of 11, and prompts that do."""
    check_greedy(windowed.make(tmp_path, kind).double(), tmp_path)


# -- what is kept ---------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_pool(paths):
    """With windows alone it runs in a few of them; a layer that keeps all bounds a request, which is told so."""
    ids = [3 + (7 * i) % 300 for i in range(300)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = LLM(paths("uniform")).generate([ids], params, use_tqdm=False)[0].outputs[0]
    small = LLM(paths("uniform"), num_gpu_blocks_override=12, debug=True)
    got = small.generate([ids, ids[:150]], params, use_tqdm=False)[0].outputs[0]
    assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)
    assert len(ids) > 12 * 8 and small.llm_engine.pool.num_owned == 0
    mixed = LLM(paths("mixed"), num_gpu_blocks_override=12, debug=True)
    most = mixed.llm_engine.limits.pool_tokens
    assert 12 * 8 < most < 3 * 12 * 8
    with pytest.raises(ContextLengthError, match=f"the KV pool of {most} tokens"):
        mixed.generate([ids], params, use_tqdm=False)
    assert len(mixed.generate([ids[: most - 19]], params, use_tqdm=False)[0].outputs[0].token_ids) == 20


def test_a_hit_behind_a_window_that_was_given_back(paths, alone):
    """The blocks that a request gave back while it ran can be found as long as nobody has taken them."""
    llm = LLM(paths("mixed"), max_num_batched_tokens=16, debug=True)
    rng = random.Random(4)
    shared = [rng.randrange(3, 320) for _ in range(70)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    first = llm.generate([shared], params, use_tqdm=False)[0]
    for length in (70, 41, 12):
        again = llm.generate([[*shared[:length], 5, 6]], params, use_tqdm=False)[0]
        assert again.num_cached_tokens == length // 8 * 8
        fresh = LLM(paths("mixed"), enable_prefix_caching=False).generate(
            [[*shared[:length], 5, 6]], params, use_tqdm=False
        )
        assert again.outputs[0].logprobs == fresh[0].outputs[0].logprobs
    assert first.num_cached_tokens == 0


def test_recorded_steps(paths):
    """A model in groups is recorded like any; and a wider table is met, so that recordings are made anew."""
    llm = LLM(paths("mixed"), debug=True)
    eager = LLM(paths("mixed"), enforce_eager=True)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=150, ignore_eos=True, logprobs=1)
    batch = [{"prompt_token_ids": ids} for ids in prompts(3)]
    runs = [[o.outputs[0].logprobs for o in one.generate(batch, params, use_tqdm=False)] for one in (llm, eager)]
    assert runs[0] == runs[1]
    shapes = llm.llm_engine.executor.runner._decode._shapes  # nothing public says it
    assert sum(recording is not None for recording in shapes.values()) >= 2


@pytest.mark.parametrize("length", [windowed.WINDOW, 4 * windowed.WINDOW])
def test_a_window_that_no_sequence_leaves_is_none(paths, length):
    llm = LLM(paths("mixed"), max_model_len=length)
    assert (set(groups(llm)) == {0}) is (length == windowed.WINDOW)
    assert KVSpec(2, 1, 1, (5, 5)).within(5) == KVSpec(2, 1, 1)
