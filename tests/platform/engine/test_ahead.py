"""Steps that are planned and started before the tokens of the step before are known: what a GPU does, on a CPU.

Here the tokens are drawn on the host as ever, and shown as if they lay on a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from quire import LLM, SamplingParams
from quire.platform.execution import model_runner as runner
from quire.platform.sampling import sampler
from quire.platform.sampling.params import BeamSearchParams
from tests.platform.engine.test_promise import answers, prompts
from tests.platform.sampling.structured import shapes


def begin_there(
    logits: torch.Tensor, draws: Sequence[sampler.TokenDraw], likeliest: Sequence[int] | None = None
) -> sampler.Sampling:
    """`sampler.begin`, as it is on a GPU: what is unconstrained is drawn there."""
    drawn = sampler.sample(logits, draws)
    there = [sampler._is_plain(draw) for draw in draws]
    tokens = [one.token_id for one, yes in zip(drawn, there, strict=True) if yes]
    return sampler.Sampling(
        draws,
        [None if yes else one for one, yes in zip(drawn, there, strict=True)],
        torch.tensor(tokens, dtype=torch.int64) if tokens else None,
    )


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setattr(runner, "begin", begin_there)

    def make(path: object, **settings: object) -> LLM:
        llm = LLM(str(path), debug=True, **settings)
        llm.llm_engine.executor.runner.looks_ahead = True
        return llm

    return make


def plain(index: int) -> SamplingParams:
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": index}, {"temperature": 1.0, "top_k": 20}]
    stops = {"stop_token_ids": list(range(0, 384, 9))} if index % 2 else {"ignore_eos": True}
    return SamplingParams(max_tokens=1 + index % 13, **{"seed": index, **kinds[index % 3], **stops})


def texts(llm: LLM, chosen: Sequence[int] = range(32)) -> list[tuple]:
    batch = prompts()
    outputs = llm.generate([{"prompt_token_ids": batch[i]} for i in chosen], [plain(i) for i in chosen], use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs]


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 13}, {"num_gpu_blocks_override": 20}, {"block_size": 1}]
)
def test_the_same_answers(tiny_path, ahead, settings):
    expected = texts(LLM(str(tiny_path), **settings))
    llm = ahead(tiny_path, **settings)
    starts = count_flights(llm)
    for _ in range(2):  # the second time with prefix hits
        assert texts(llm) == expected
    assert len(starts) > 10
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.scheduler.num_preemptions > 0


def count_flights(llm: LLM) -> list[int]:
    """Grows with each step that is started while another one runs."""
    engine, starts = llm.llm_engine, []
    execute = engine.executor.runner.execute

    def counting(plan):
        if any(-1 in chunk.token_ids for chunk in plan.chunks):
            starts.append(1)
        return execute(plan)

    engine.executor.runner.execute = counting
    return starts


def test_any_mixture_of_requests(tiny_path, ahead):
    """With logprobs, penalties and prompt logprobs, steps that cannot be looked past come and go."""
    expected = answers(LLM(str(tiny_path)), list(range(32)))
    llm = ahead(tiny_path, max_num_seqs=5)
    assert answers(llm, list(range(32))) == expected
    assert texts(llm) == texts(LLM(str(tiny_path)))


def test_forks_and_beams(tiny_path, ahead):
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    llm, plainly = ahead(tiny_path), LLM(str(tiny_path))
    batch = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 30}]
    both = [params, SamplingParams(max_tokens=20, seed=1)]
    forks = [
        [[one.token_ids for one in output.outputs] for output in which.generate(batch, both, use_tqdm=False)]
        for which in (llm, plainly)
    ]
    assert forks[0] == forks[1]
    assert [b.tokens for b in llm.beam_search([[5, 6]], beams)[0].sequences] == [
        b.tokens for b in plainly.beam_search([[5, 6]], beams)[0].sequences
    ]


def test_stop_strings_and_streams(tiny_path, ahead):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = LLM(str(tiny_path)).generate("Once upon", params, use_tqdm=False)[0].outputs[0].text
    stop = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[whole[10:13]])
    assert (
        ahead(tiny_path).generate("Once upon", stop, use_tqdm=False)[0].outputs[0].text
        == LLM(str(tiny_path)).generate("Once upon", stop, use_tqdm=False)[0].outputs[0].text
    )


def test_aborts_at_any_moment(tiny_path, ahead):
    llm = ahead(tiny_path, num_gpu_blocks_override=40)
    engine, rng = llm.llm_engine, random.Random(5)
    batch = prompts()
    alive: set[str] = set()
    for number in range(300):
        if number < 200 and rng.random() < 0.4:
            name = str(number)
            engine.add_request(name, {"prompt_token_ids": batch[number % 32]}, plain(number))
            alive.add(name)
        if alive and rng.random() < 0.25:
            gone = rng.choice(sorted(alive))
            engine.abort_request(gone)
            alive.discard(gone)
        for output in engine.step():
            assert -1 not in output.outputs[0].token_ids
            if output.finished:
                alive.discard(output.request_id)
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()  # lands what still flies
    engine.check_integrity()
    assert engine.pool.num_owned == 0 and not engine.core._in_flight


def test_a_step_that_fails_to_start(tiny_path, ahead):
    """What runs is committed first; its sequences are then run one by one, with the tokens that are known by then."""
    llm = ahead(tiny_path)
    expected = texts(LLM(str(tiny_path)), range(6, 13))
    engine, execute, failures = llm.llm_engine, llm.llm_engine.executor.runner.execute, []

    def failing(plan):
        if len(plan.chunks) > 1 and any(-1 in chunk.token_ids for chunk in plan.chunks) and len(failures) < 2:
            failures.append(plan)
            raise RuntimeError("no")
        return execute(plan)

    engine.executor.runner.execute = failing
    assert texts(llm, range(6, 13)) == expected
    assert len(failures) == 2


@pytest.mark.parametrize("later", ["ends well", "fails as it runs", "does not start"])
def test_a_step_that_fails_while_it_runs(tiny_path, ahead, later):
    """Its sequences begin again, one by one where that does not help, and the request that makes it fail ends; those
    beside it, those of the step behind it and those that wait are served."""
    llm = ahead(tiny_path, max_num_seqs=2)
    engine, execute = llm.llm_engine, llm.llm_engine.executor.runner.execute
    broken = []

    def failing(plan):
        fails = any(chunk.start <= 6 < chunk.end for chunk in plan.chunks)
        if fails and broken and later == "does not start":
            explode()
        execution = execute(plan)
        if fails and not (broken and later == "ends well"):
            broken.append(execution)
            object.__setattr__(execution._sampling, "result", explode)
        return execution

    def explode():
        raise RuntimeError("the device is gone")

    engine.executor.runner.execute = failing
    params = {"a": 6, "b": 3, "c": 2}
    for name, most in params.items():
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=most, ignore_eos=True))
    ends = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ends[output.request_id] = output.outputs[0].finish_reason
    assert ends == {"a": "length" if later == "ends well" else "error", "b": "length", "c": "length"} and broken
    engine.check_integrity()
    assert engine.pool.num_owned == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["prepare", "result"])
def test_a_step_that_is_broken_off(tiny_path, ahead, error, place):
    """Whoever goes on stepping loses nothing, and whoever gives up leaves nothing behind that others wait for."""
    llm = ahead(tiny_path)
    expected = texts(LLM(str(tiny_path)), range(6, 12))
    engine, broken = llm.llm_engine, []
    batch = prompts()

    def breaking(function):
        def called(*given):
            if engine.core._in_flight and len(broken) < 3:
                broken.append(1)
                raise error("broken off")
            return function(*given)

        return called

    def once_more() -> list:
        try:
            return engine.step()
        except error:
            return []

    if place == "prepare":
        engine.executor.runner.prepare = breaking(engine.executor.runner.prepare)
    else:
        execute = engine.executor.runner.execute

        def executing(plan):
            execution = execute(plan)
            if error is KeyboardInterrupt:  # an Exception there is a step that fails: tested above
                object.__setattr__(execution._sampling, "result", breaking(execution._sampling.result))
            return execution

        engine.executor.runner.execute = executing
    for i in range(6, 12):
        engine.add_request(str(i), {"prompt_token_ids": batch[i]}, plain(i))
    ends: dict[str, tuple] = {}
    while engine.has_unfinished_requests():
        for output in once_more():
            if output.finished:
                one = output.outputs[0]
                ends[output.request_id] = (one.token_ids, one.finish_reason, one.stop_reason)
    assert [ends[str(i)] for i in range(6, 12)] == expected
    assert len(broken) == (0 if place == "result" and error is RuntimeError else 3)
    # Given up in mid-flight, it does not hold up a search of beams that wait for one another's blocks.
    broken.clear()
    engine.add_request("given up", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9, ignore_eos=True))
    while not broken and engine.has_unfinished_requests():
        once_more()
    engine.abort_request("given up")
    broken[:] = [1, 1, 1]
    once_more()
    assert not engine.scheduler._flights
    assert texts(llm, range(6, 12)) == expected


def test_a_row_that_cannot_be_drawn(tiny_path, ahead, monkeypatch):
    """Its request ends; the step that was started with its token harms nobody."""
    llm = ahead(tiny_path)
    model = llm.llm_engine.executor.runner.model
    logits = model.logits

    def spoilt(hidden):
        rows = logits(hidden)
        if len(rows) == 2 and len(llm.llm_engine.scheduler.running[0].output_ids) == 4:
            rows[0] = torch.nan
        return rows

    expected = texts(LLM(str(tiny_path)), [6])
    monkeypatch.setattr(model, "logits", spoilt)
    llm.llm_engine.executor.runner._decode._recording = None
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": [5]}, {"prompt_token_ids": prompts()[6]}], [params, plain(6)], use_tqdm=False
    )
    assert outputs[0].outputs[0].finish_reason == "error" and len(outputs[0].outputs[0].token_ids) == 4
    assert outputs[1].outputs[0].token_ids == expected[0][0]


def test_shapes_beside_steps_that_look_ahead(tiny_path, ahead: Callable[..., LLM]) -> None:
    """Whoever has a shape is waited for: what must follow a token is not known on the device."""
    batch, given = shapes.prompts(16), [shapes.params(index) for index in range(16)]

    def all_of(llm: LLM) -> list[list[tuple]]:
        outputs = llm.generate(batch, given, use_tqdm=False)
        return [[(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for output in outputs]

    assert all_of(ahead(tiny_path)) == all_of(LLM(str(tiny_path)))
