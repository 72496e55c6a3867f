"""Layers with states: promise 1 and what may happen to blocks, for both families that have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import QuireError, UnsupportedModelError
from quire.models.loader import load_model
from quire.platform.execution.memory import count_states
from quire.platform.sampling.params import BeamSearchParams
from quire.types import STATE
from tests.models.tiny import make, save
from tests.platform.engine.parity import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

FALCON, GRANITE = "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM"
VARIANTS = {FALCON: "as_published", GRANITE: "h_micro"}
BATCH = prompts(97)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def get(architecture: str) -> str:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = str(save(make(architecture, VARIANTS[architecture]), folder))
        return made[architecture]

    return get


def engine(path: str, **settings: Any) -> LLM:
    return LLM(path, skip_tokenizer_init=True, **{"debug": True, "block_size": 4, **settings})


def answers(llm: LLM, chosen: range = range(len(BATCH))) -> list[Any]:
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10 + i % 5, ignore_eos=True, logprobs=2)
        for i in chosen
    ]
    outputs = llm.generate([BATCH[i] for i in chosen], params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    pool = llm.llm_engine.pool
    assert pool.num_owned == 0 and pool.num_free_states == pool.num_states
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def alone(path_of: Callable[[str], str]) -> Callable[[str], list[Any]]:
    """What each request gives by itself in an engine that has no prefix cache and cuts nothing."""
    known: dict[str, list[Any]] = {}

    def of(architecture: str) -> list[Any]:
        if architecture not in known:
            llm = engine(path_of(architecture), enable_prefix_caching=False, debug=False, block_size=16)
            known[architecture] = [answers(llm, range(i, i + 1))[0] for i in range(len(BATCH))]
        return known[architecture]

    return of


@pytest.mark.parametrize(
    ("architecture", "budget"),
    [(FALCON, 13), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((GRANITE, 5), (FALCON, 2048)))],
)
def test_a_crowd_any_chunking_and_prefix_hits(path_of, alone, architecture, budget):
    llm = engine(path_of(architecture), max_num_batched_tokens=budget)
    assert llm.llm_engine.executor.facts.windows == (0, STATE)
    for _ in range(2):
        assert answers(llm) == alone(architecture)
    assert llm.llm_engine.scheduler.kv.prefix_hits > 0


@pytest.mark.parametrize("architecture", [GRANITE, pytest.param(FALCON, marks=pytest.mark.slow)])
def test_preemption(path_of, alone, architecture):
    """By want of blocks, and by want of states: then there are fewer than sequences that could run."""
    llm = engine(path_of(architecture), num_gpu_blocks_override=24, max_num_batched_tokens=11)
    assert answers(llm) == alone(architecture)
    assert llm.llm_engine.scheduler.num_preemptions > 0 and llm.llm_engine.scheduler.num_swaps == 0
    scarce = engine(path_of(architecture), max_num_batched_tokens=64, debug=False)
    pool = scarce.llm_engine.pool
    pool.allocate_states(pool.num_states - 5)  # nobody's
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    together = scarce.generate(BATCH, params, use_tqdm=False)
    calm = engine(path_of(architecture)).generate(BATCH, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in calm]
    assert scarce.llm_engine.scheduler.num_preemptions > 0


def test_forks_and_beams(path_of):
    params = [SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=9 + i, logprobs=2) for i in range(5)]
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)

    def run(llm: LLM) -> list[Any]:
        outputs = llm.generate(BATCH[:5], params, use_tqdm=False)
        found = [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]
        searched = llm.beam_search([{"prompt_token_ids": ids} for ids in BATCH[:3]], beams)
        llm.llm_engine.check_integrity()
        return [found, [[(beam.tokens, beam.cum_logprob) for beam in one.sequences] for one in searched]]

    expected = run(engine(path_of(FALCON), debug=False))
    tight = engine(path_of(FALCON), max_num_batched_tokens=20, num_gpu_blocks_override=26)
    assert run(tight) == expected
    assert tight.llm_engine.scheduler.num_preemptions > 0


def test_a_step_that_fails_is_run_again(path_of, alone, monkeypatch):
    """One by one, after its layers have written: their states are not taken for those in front of the step."""
    llm = engine(path_of(FALCON), max_num_batched_tokens=13)
    runner, count = llm.llm_engine.executor.runner, 0
    execute = runner._execute

    def failing(plan: Any, sequences: Any) -> Any:
        nonlocal count
        count += 1
        step = execute(plan, sequences)
        if count % 4 == 0 and len(plan.chunks) > 1:
            raise RuntimeError("after all was computed")
        return step

    monkeypatch.setattr(runner, "_execute", failing)
    assert answers(llm) == alone(FALCON)
    assert count > 20


def test_an_interrupted_step(path_of, alone, monkeypatch):
    llm = engine(path_of(FALCON), max_num_batched_tokens=13)
    core, runner, count = llm.llm_engine, llm.llm_engine.executor.runner, 0
    execute = runner._execute

    def interrupted(plan: Any, sequences: Any) -> Any:
        nonlocal count
        count += 1
        step = execute(plan, sequences)
        if count % 5 == 0:
            raise KeyboardInterrupt
        return step

    monkeypatch.setattr(runner, "_execute", interrupted)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
    for i in (0, 10):
        core.add_request(str(i), {"prompt_token_ids": BATCH[i]}, params)
    found: dict[str, Any] = {}
    while core.has_unfinished_requests():
        try:
            found |= {one.request_id: one.outputs[0] for one in core.step() if one.finished}
        except KeyboardInterrupt:
            continue
    assert count > 10
    assert [(found[str(i)].token_ids, found[str(i)].logprobs) for i in (0, 10)] == [alone(FALCON)[i] for i in (0, 10)]


def test_sleep_forgets_states(path_of, alone):
    llm = engine(path_of(FALCON))
    assert answers(llm) == alone(FALCON)
    llm.sleep(1)
    llm.wake_up()
    assert answers(llm) == alone(FALCON)


def test_a_long_prompt_leaves_states_for_others(path_of, monkeypatch):
    """Every so many tokens, and before its end; a hit ends where there is one."""
    from quire.platform.kv import state_tables

    monkeypatch.setattr(state_tables, "_STATE_EVERY", 16)
    llm = engine(path_of(FALCON), max_num_seqs=4)
    ids = [5 + i * i % 89 for i in range(70)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    llm.generate([ids], params, use_tqdm=False)
    for length, cached in ((70, 68), (60, 48), (40, 32), (15, 0)):
        again = llm.generate([[*ids[:length], 3]], params, use_tqdm=False)[0]
        fresh = engine(path_of(FALCON), enable_prefix_caching=False).generate(
            [[*ids[:length], 3]], params, use_tqdm=False
        )[0]
        assert again.num_cached_tokens == cached
        assert again.outputs[0].logprobs == fresh.outputs[0].logprobs


@pytest.mark.slow
def test_another_process(path_of, alone):
    llm = engine(path_of(GRANITE), executor="process", num_gpu_blocks_override=30, max_num_batched_tokens=40)
    assert answers(llm) == alone(GRANITE)
    llm.llm_engine.close()


def test_the_pool_says_what_it_cannot_hold(path_of):
    with pytest.raises(QuireError, match=r"1 states, each of which takes .* a sequence needs 2"):
        engine(path_of(FALCON), num_gpu_blocks_override=1)
    llm = engine(path_of(FALCON), max_num_seqs=3)
    spec, config = load_model(path_of(FALCON)).kv_spec, llm.llm_engine.config.cache
    assert llm.llm_engine.pool.num_states == 12 == count_states(config, spec, 10, 3, 10**6)
    assert count_states(config, spec, 1000, 3, 10_000) == 5


def test_a_gpu_is_refused_before_weights_are_read(path_of: Callable[[str], str], tmp_path: Path) -> None:
    from quire.kernels import rehearsal
    from quire.models import loader
    from quire.models import rehearsal as models

    assert rehearsal is not None
    model = loader.load_structure(path_of(FALCON))
    with pytest.raises(UnsupportedModelError, match=r"layers with states \(Mamba-2\) have kernels for the CPU alone"):
        models.rehearse(model, torch.float32, torch.device("cuda"))
