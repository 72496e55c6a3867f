"""Preempted sequences whose blocks go to main memory and come back: as on a GPU, but on a CPU.

Promise 1 with it: tokens and logprobs are bitwise the same as those of sequences that were never preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import CacheConfig
from quire.platform.execution import host_cache, worker
from quire.platform.execution.memory import count_swap_blocks
from quire.platform.sampling.params import BeamSearchParams
from tests.lora import adapter_files, test_adapter_promise
from tests.multimodal import open_engine, test_image_promise, tiny_vision
from tests.platform.engine.test_ahead import ahead, begin_there, plain, texts  # noqa: F401
from tests.platform.engine.test_promise import REQUESTS, answers, prompts

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYTHING = list(range(REQUESTS))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the engines of a test so many blocks in main memory, in small pieces."""

    def give(count: int) -> None:
        monkeypatch.setattr(worker, "count_swap_blocks", lambda *_: count)
        monkeypatch.setattr(host_cache, "_PIECE_BYTES", 30_000)

    return give


@pytest.fixture(scope="module")
def calm(tiny_path) -> dict[int, tuple]:
    return answers(LLM(str(tiny_path), enable_prefix_caching=False), EVERYTHING)


def nothing_left(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.check_integrity()
    assert engine.pool.num_owned == 0
    assert engine.scheduler.kv.swap.num_free == engine.scheduler.kv.swap.num_blocks


# -- the promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "cached", "budget"), [(1, True, 2048), (8, False, 13), (8, True, 64)])
def test_preemption(tiny_path, calm, hosts, block_size, cached, budget):
    hosts(1000)
    llm = LLM(
        str(tiny_path), block_size=block_size, num_gpu_blocks_override=240 // block_size, enable_prefix_caching=cached,
        max_num_batched_tokens=budget, debug=True,
    )  # fmt: skip
    assert answers(llm, EVERYTHING) == calm
    nothing_left(llm)
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_swaps == scheduler.num_preemptions > 0
    assert scheduler.kv.swap.num_saved >= scheduler.kv.swap.num_fetched > 0


def test_main_memory_for_some(tiny_path, calm, hosts):
    hosts(9)
    llm = LLM(str(tiny_path), num_gpu_blocks_override=30, debug=True)
    assert answers(llm, EVERYTHING) == calm
    nothing_left(llm)
    assert 0 < llm.llm_engine.scheduler.num_swaps < llm.llm_engine.scheduler.num_preemptions


def test_none_on_a_cpu_and_none_where_it_is_off(tiny_llm):
    assert tiny_llm.llm_engine.scheduler.kv.swap.num_blocks == 0
    gpu = torch.device("cuda")
    assert count_swap_blocks(CacheConfig(swap_bytes=1 << 20), 1 << 10, gpu) == 1 << 10
    assert count_swap_blocks(CacheConfig(swap_bytes=0), 1 << 10, gpu) == 0
    assert 0 < count_swap_blocks(CacheConfig(swap_bytes=1 << 60), 1, gpu) < 1 << 60  # what there is


def test_nothing_is_computed_twice(tiny_path, hosts):
    hosts(1000)
    llm = LLM(str(tiny_path), num_gpu_blocks_override=30, enable_prefix_caching=False, debug=True)
    engine, computed = llm.llm_engine, []
    execute = engine.executor.runner.execute

    def counting(plan):
        computed.append(sum(chunk.length for chunk in plan.chunks))
        return execute(plan)

    engine.executor.runner.execute = counting
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts()], SamplingParams(max_tokens=15, ignore_eos=True), use_tqdm=False
    )
    assert engine.scheduler.num_swaps > 0
    assert sum(o.metrics.num_preemptions for o in outputs) == engine.scheduler.num_preemptions
    # The last token of each answer is never computed.
    assert sum(computed) == sum(map(len, prompts())) + REQUESTS * (15 - 1)


def test_forks_and_beams(tiny_path, hosts):
    params = [SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=9 + i, logprobs=2) for i in range(6)]
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    batch = [{"prompt_token_ids": ids} for ids in prompts(6)]

    def run(llm: LLM) -> list[Any]:
        outputs = llm.generate(batch, params, use_tqdm=False)
        found = [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]
        searched = llm.beam_search([ids["prompt_token_ids"] for ids in batch], beams)
        nothing_left(llm)
        return [found, [[(beam.tokens, beam.cum_logprob) for beam in one.sequences] for one in searched]]

    expected = run(LLM(str(tiny_path)))
    hosts(200)
    for settings in ({"num_gpu_blocks_override": 20}, {"num_gpu_blocks_override": 112, "block_size": 1}):
        llm = LLM(str(tiny_path), debug=True, max_num_batched_tokens=40, **settings)
        assert run(llm) == expected
        assert llm.llm_engine.scheduler.num_swaps > 0


def test_out_and_in_at_once(tiny_path, hosts):
    """Of beams that all wait for one another, one goes for another to come back, to the same blocks maybe."""
    beams = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    batch = [{"prompt_token_ids": ids[:4]} for ids in prompts(12)]
    expected = LLM(str(tiny_path)).beam_search(batch, beams)
    hosts(60)
    llm = LLM(str(tiny_path), block_size=1, num_gpu_blocks_override=12, enable_prefix_caching=False, debug=True)
    prepare, reused = llm.llm_engine.executor.runner.prepare, []

    def watched(plan):
        reused.extend({block for block, _ in plan.swap_out} & {block for _, block in plan.swap_in})
        prepare(plan)

    llm.llm_engine.executor.runner.prepare = watched
    assert [one.sequences for one in llm.beam_search(batch, beams)] == [one.sequences for one in expected]
    nothing_left(llm)
    assert reused


def test_adapters(tiny_path, tmp_path, hosts):
    kinds = (None, "one", "four", "dora")
    folders = {
        "one": adapter_files.plain(tmp_path / "one", 1, rank=1, targets=("self_attn.v_proj",)),
        "four": adapter_files.plain(tmp_path / "four", 2, rank=4, targets=adapter_files.ALL),
        "dora": adapter_files.dora(tmp_path / "dora", 4),
    }

    def run(llm: LLM) -> list[Any]:
        adapters = [test_adapter_promise.adapter(i, kinds) for i in range(18)]
        outputs = llm.generate(
            prompts(18), [test_adapter_promise.params(i) for i in range(18)], lora_request=adapters, use_tqdm=False
        )
        nothing_left(llm)
        return [([(c.token_ids, c.logprobs) for c in output.outputs], output.prompt_logprobs) for output in outputs]

    expected = run(test_adapter_promise.opened(tiny_path, folders))
    hosts(100)
    llm = test_adapter_promise.opened(tiny_path, folders, num_gpu_blocks_override=20, max_loras=2)
    assert run(llm) == expected
    assert llm.llm_engine.scheduler.num_swaps > 0


@pytest.mark.parametrize("kind", [open_engine.KINDS[0], open_engine.KINDS[2]], ids=lambda kind: kind.name)
def test_images(tmp_path, hosts, kind):
    """With room for one image's features: what came back goes on in the middle of an image that is encoded again."""
    path = str(tiny_vision.build(kind.architecture, kind.variant, tmp_path))
    requests = test_image_promise.requests()
    expected = test_image_promise.answers(open_engine.open_llm(path), requests)
    hosts(100)
    llm = open_engine.open_llm(
        path, max_num_batched_tokens=23, block_size=4, num_gpu_blocks_override=7 + kind.most_tokens * 2 // 3,
        media_cache_bytes=open_engine.room_for(kind.most_tokens),
    )  # fmt: skip
    assert test_image_promise.answers(llm, requests * 3) == expected * 3
    nothing_left(llm)
    assert llm.llm_engine.scheduler.num_swaps > 0


# -- looking ahead, and aborts --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13}, {"enable_prefix_caching": False}])
def test_steps_planned_ahead(tiny_path, ahead, hosts, settings):  # noqa: F811
    """A sequence is preempted while the step runs that draws its token."""
    expected = texts(LLM(str(tiny_path)))
    hosts(100)
    llm = ahead(tiny_path, num_gpu_blocks_override=20, **settings)
    scheduler, saved = llm.llm_engine.scheduler, []
    save = scheduler.kv.swap.save

    def watched(sequence_id, blocks, tokens):
        pending = next(sequence.pending for sequence in scheduler.running if sequence.id == sequence_id)
        saved.append((pending, save(sequence_id, blocks, tokens)))
        return saved[-1][1]

    scheduler.kv.swap.save = watched
    for _ in range(2):
        assert texts(llm) == expected
    nothing_left(llm)
    assert (True, True) in saved


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13}])
def test_what_a_failed_step_has_left_is_not_kept(tiny_path, ahead, hosts, settings):  # noqa: F811
    """A sequence is preempted, and what it has is saved, while the step runs that then fails."""
    expected = texts(LLM(str(tiny_path)))
    hosts(100)
    llm = ahead(tiny_path, num_gpu_blocks_override=20, **settings)
    engine, failed = llm.llm_engine, []
    scheduler, execute = engine.scheduler, engine.executor.execute

    def executing(plan):
        execution = execute(plan)
        result = type(execution).result

        def failing():
            own, swap = {chunk.sequence_id for chunk in plan.chunks}, scheduler.kv.swap
            saved = [s.id for s in scheduler.waiting if s.id in own and swap.tokens_of(s.id)]
            if len(failed) < 5 and saved:
                failed.append(plan)
                host = engine.executor.runner._host
                for block in (block for one in saved for block in swap._kept[one].blocks):
                    host._pieces[block // host._piece_blocks][block % host._piece_blocks] = 255  # NaN, as of no step
                raise MemoryError("there is none")
            return result(execution)

        return SimpleNamespace(plan=plan, known_there=execution.known_there, ready=False, result=failing)

    engine.executor.execute = executing
    assert texts(llm) == expected
    assert failed
    nothing_left(llm)


def test_a_mixture_of_steps(tiny_path, calm, ahead, hosts):  # noqa: F811
    hosts(60)
    llm = ahead(tiny_path, num_gpu_blocks_override=25)
    assert answers(llm, EVERYTHING) == calm
    assert texts(llm) == texts(LLM(str(tiny_path)))
    nothing_left(llm)
    assert llm.llm_engine.scheduler.num_swaps > 0


@pytest.mark.parametrize("count", [8, 100])
@pytest.mark.parametrize("looking", [False, True])
def test_aborts_at_any_moment(tiny_path, ahead, hosts, count, looking):  # noqa: F811
    hosts(count)
    llm = ahead(tiny_path, num_gpu_blocks_override=25)
    engine, rng, batch = llm.llm_engine, random.Random(count), prompts()
    engine.executor.runner.looks_ahead = looking
    alive: set[str] = set()
    swapped_away = 0
    for number in range(400):
        if number < 350 and rng.random() < 0.6:
            name = str(number)
            params = plain(number)
            if rng.random() < 0.3:
                params = SamplingParams(n=3, temperature=1.0, seed=number, max_tokens=8)
            engine.add_request(name, {"prompt_token_ids": batch[number % 32]}, params)
            alive.add(name)
        if alive and rng.random() < 0.2:
            waiting = [
                s.request.request_id for s in engine.scheduler.waiting if engine.scheduler.kv.swap.tokens_of(s.id)
            ]
            gone = rng.choice(waiting or sorted(alive))
            swapped_away += bool(waiting)
            engine.abort_request(gone)
            alive.discard(gone)
            engine.check_integrity()
        alive -= {output.request_id for output in engine.step() if output.finished}
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()  # lands what still flies
    nothing_left(llm)
    assert swapped_away


def test_a_step_that_fails(tiny_path, hosts):
    """It is run chunk by chunk; what came back from main memory for it is there already."""
    expected = texts(LLM(str(tiny_path)))
    hosts(100)
    llm = LLM(str(tiny_path), num_gpu_blocks_override=20, debug=True)
    engine, execute, failures = llm.llm_engine, llm.llm_engine.executor.runner.execute, []

    def failing(plan):
        if plan.swap_in and len(plan.chunks) > 1:
            failures.append(plan)
            raise RuntimeError("no")
        return execute(plan)

    engine.executor.runner.execute = failing
    assert texts(llm) == expected
    nothing_left(llm)
    assert failures
