"""Steps that are planned and started while a worker's process computes the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.platform.execution import remote
from quire.platform.scheduling.plan import PENDING_TOKEN, StepPlan
from tests.lora import adapter_files
from tests.models import rows
from tests.models.tiny import build
from tests.platform.engine.test_promise import prompts
from tests.platform.execution.executors.helpers import SMALL, processes

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"executor": "process"},
    "two": {"tensor_parallel_size": 2},
}
EACH = [pytest.param(SETTINGS["one"], id="one"), pytest.param(SETTINGS["two"], id="two", marks=pytest.mark.slow)]


def flights(llm: LLM) -> list[StepPlan]:
    """Grows with each plan that goes on from tokens which nobody has seen."""
    executor, plans = llm.llm_engine.executor, []
    prepare = executor.prepare

    def counting(plan: StepPlan) -> None:
        if any(PENDING_TOKEN in chunk.token_ids for chunk in plan.chunks):
            plans.append(plan)
        prepare(plan)

    executor.prepare = counting
    return plans


def plain(index: int) -> SamplingParams:
    """Greedy and drawn, short and long, and some that end by a token, which nobody foresees."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"top_k": 20}]
    stops = {"stop_token_ids": list(range(0, 384, 9))} if index % 2 else {"ignore_eos": True}
    return SamplingParams(max_tokens=1 + index % 13, seed=index, **kinds[index % 3], **stops)


def answers(llm: LLM, given: Callable[[int], SamplingParams] = plain) -> list[tuple[Any, ...]]:
    size = llm.llm_engine.executor.facts.vocab_size
    batch = [{"prompt_token_ids": [token % size for token in ids]} for ids in prompts()[:24]]
    outputs = llm.generate(batch, [given(index) for index in range(24)], use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    found = [[(one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs] for output in outputs]
    return [tuple(one) for one in found]


@pytest.fixture(autouse=True)
def no_step_fails(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step that cannot go on from what nobody has seen would be computed again, and give the right answers."""
    yield
    if "failing" not in request.fixturenames:
        assert not [record for record in caplog.get_records("call") if "failed" in record.getMessage()]


@pytest.mark.parametrize("settings", EACH)
def test_the_same_answers(tiny_path: Path, settings: dict[str, Any]) -> None:
    """On a pool so small that sequences are preempted, some of them with a token that nobody has seen."""
    expected = answers(LLM(str(tiny_path), **SMALL))
    llm = LLM(str(tiny_path), **settings, **SMALL)
    ahead = flights(llm)
    for _ in range(2):  # the second time with prefix hits
        assert answers(llm) == expected
    assert len(ahead) > 10 and llm.llm_engine.scheduler.num_preemptions > 0
    llm.llm_engine.close()


def watched(index: int) -> SamplingParams:
    """Of a penalty, of logprobs, forked with a penalty, forked."""
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7}, {"logprobs": 2}, {"n": 3, "frequency_penalty": 0.7}, {"n": 3},
    ]  # fmt: skip
    return SamplingParams(max_tokens=2 + index % 9, seed=index, ignore_eos=True, **kinds[index // 3 % 4])


def test_whoever_must_be_seen_is(tiny_path: Path) -> None:
    """A step with one of them, and no other, is waited for."""

    def mixed(index: int) -> SamplingParams:
        return watched(index) if index % 3 == 0 else plain(index)

    expected = answers(LLM(str(tiny_path), max_num_seqs=3), mixed)
    llm = LLM(str(tiny_path), executor="process", max_num_seqs=3)
    ahead = flights(llm)
    assert answers(llm, mixed) == expected
    assert ahead
    ahead.clear()

    def penalized(index: int) -> SamplingParams:
        return watched(index % 9)

    assert answers(llm, penalized) == answers(LLM(str(tiny_path)), penalized)
    assert not ahead
    answers(llm)  # with these plans the worker hears of the last ends
    assert not llm.llm_engine.executor._watched._ids, "nobody is watched for ever"
    llm.llm_engine.close()


@pytest.mark.parametrize("settings", EACH)
@pytest.mark.parametrize("debug", [False, True], ids=["", "poisoned"])
def test_a_step_that_fails_once(
    tiny_path: Path, failing: Callable[..., None], settings: dict[str, Any], debug: bool
) -> None:
    """What was started behind it is thrown away with it, and nobody hears of either."""
    expected = answers(LLM(str(tiny_path)))
    failing(0, 12, 1)
    llm = LLM(str(tiny_path), debug=debug, **settings)
    scheduler, again = llm.llm_engine.scheduler, []
    begin_again = scheduler.begin_again
    scheduler.begin_again = lambda plan: (again.append(plan), begin_again(plan))
    assert answers(llm) == expected
    assert again and llm.llm_engine.executor.health_error() is None
    llm.llm_engine.close()


def test_a_request_whose_steps_fail(tiny_path: Path, failing: Callable[..., None]) -> None:
    """It ends, and the others go on: those in the step, and those in the one that was started behind it."""
    failing(0, 40, 10**6)
    llm = LLM(str(tiny_path), executor="process", max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name, length in {"a": 3, "b": 35, "c": 6, "d": 9}.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": [5 + i for i in range(length)]}, params)
    outputs = {name: output.outputs[0] for name, output in adapter_files.drive(llm.llm_engine).items()}
    assert {name: one.finish_reason for name, one in outputs.items()} == {
        "a": "length", "b": "error", "c": "length", "d": "length",
    }  # fmt: skip
    assert "MemoryError" in outputs["b"].stop_reason
    alone = LLM(str(tiny_path))
    for name, length in {"a": 3, "c": 6, "d": 9}.items():
        prompt = {"prompt_token_ids": [5 + i for i in range(length)]}
        assert outputs[name].token_ids == alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    llm.llm_engine.check_integrity()
    llm.llm_engine.close()


FAMILIES = {
    "windows": "Gemma2ForCausalLM",
    "states": "FalconH1ForCausalLM",
    "latents": "DeepseekV2ForCausalLM",
    "positions that are added": "GPT2LMHeadModel",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    build(FAMILIES[name], next(iter(rows.entry(FAMILIES[name])[2])), tmp_path)
    expected = answers(LLM(str(tmp_path), skip_tokenizer_init=True), untexted)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, executor="process")
    ahead = flights(llm)
    assert answers(llm, untexted) == expected and ahead
    llm.llm_engine.close()


def untexted(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=2 + index % 7, detokenize=False)


def test_adapters_that_come_and_go(tiny_path: Path, tmp_path: Path) -> None:
    """With room for one on the device: a plan that installs another comes while a step with the first one runs."""
    folders = {name: adapter_files.plain(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c"))}
    wanted = [LoRARequest(name, 1 + i, str(folders[name])) for i, name in enumerate(folders)]
    adapters = [wanted[i % 3] if i % 4 else None for i in range(12)]

    def run(llm: LLM) -> list[Any]:
        batch = [{"prompt_token_ids": ids} for ids in prompts()[:12]]
        outputs = llm.generate(batch, [plain(i) for i in range(12)], lora_request=adapters, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = run(LLM(str(tiny_path), enable_lora=True))
    llm = LLM(str(tiny_path), enable_lora=True, executor="process", max_loras=1)
    ahead = flights(llm)
    assert run(llm) == expected and ahead
    llm.llm_engine.close()


def test_a_draft_model_sees_every_token(tiny_path: Path) -> None:
    """It reads tokens before they are filled in: nothing goes ahead of it."""
    expected = answers(LLM(str(tiny_path)))
    drafts = {"model": str(tiny_path), "num_speculative_tokens": 3}
    llm = LLM(str(tiny_path), executor="process", speculative_config=drafts)
    ahead = flights(llm)
    assert answers(llm) == expected and not ahead
    llm.llm_engine.close()


def test_drafts_from_the_text_beside_steps_ahead(tiny_path: Path) -> None:
    expected = answers(LLM(str(tiny_path)))
    llm = LLM(str(tiny_path), executor="process", speculative_config={"method": "ngram"})
    ahead = flights(llm)
    assert answers(llm) == expected and ahead
    llm.llm_engine.close()


def test_an_interrupt_while_a_large_plan_waits(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is sent with the next message: the scheduler takes it for delivered."""
    monkeypatch.setattr(remote, "_SMALL_BYTES", 0)
    expected = answers(LLM(str(tiny_path)))
    llm = LLM(str(tiny_path), executor="process")
    executor, engine, broken = llm.llm_engine.executor, llm.llm_engine, []
    take = executor._take_answers

    def interrupted() -> None:
        if engine.core._in_flight and len(broken) < 3:
            broken.append(1)
            raise KeyboardInterrupt
        take()

    executor._take_answers = interrupted
    for index, ids in enumerate(prompts()[:24]):
        engine.add_request(str(index), {"prompt_token_ids": ids}, plain(index))
    found: dict[str, tuple[Any, ...]] = {}
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        for output in outputs:
            one = output.outputs[0]
            found[output.request_id] = ((one.token_ids, one.finish_reason, one.stop_reason),)
    assert [found[str(index)] for index in range(24)] == expected and len(broken) == 3
    llm.llm_engine.close()


def test_a_worker_that_dies_after_a_step_has_failed(tiny_path: Path, failing: Callable[..., None]) -> None:
    """All requests end: nothing is tried again and again."""
    failing(0, 12, 1)
    llm = LLM(str(tiny_path), executor="process")
    scheduler, (worker,) = llm.llm_engine.scheduler, processes(llm)
    begin_again = scheduler.begin_again

    def and_die(plan: StepPlan) -> None:
        worker.link.process.kill()
        begin_again(plan)

    scheduler.begin_again = and_die
    for index in range(4):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": [5 + index] * 9}, plain(6 + 6 * index))
    outputs = adapter_files.drive(llm.llm_engine)
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"error"}


@pytest.mark.parametrize("settings", EACH)
def test_a_step_behind_one_that_has_failed_is_not_begun(
    tiny_path: Path, failing: Callable[..., None], settings: dict[str, Any]
) -> None:
    """Though it goes on from no token: the rest of a prompt."""
    failing(0, 9, 1)
    llm = LLM(str(tiny_path), **settings, max_num_batched_tokens=8)
    executor, errors = llm.llm_engine.executor, []
    execute = executor.execute

    def executing(plan: StepPlan) -> Any:
        execution = execute(plan)
        result = execution.result

        def watched() -> Any:
            try:
                return result()
            except Exception as error:
                errors.append(str(error))
                raise

        execution.result = watched
        return execution

    executor.execute = executing
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [5 + i % 60 for i in range(40)]}
    expected = LLM(str(tiny_path)).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert executor.health_error() is None
    assert "the step before has failed" in errors[-1] and len(set(errors)) == 2
    llm.llm_engine.close()
