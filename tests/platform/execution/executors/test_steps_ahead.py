"""Steps that are planned and started while a worker's process computes the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.platform.scheduling.plan import PENDING_TOKEN, StepPlan
from tests.lora import adapter_files
from tests.platform.engine.test_promise import prompts
from tests.platform.execution.executors.helpers import SMALL

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
    batch = [{"prompt_token_ids": ids} for ids in prompts()[:24]]
    outputs = llm.generate(batch, [given(index) for index in range(24)], use_tqdm=False)
    llm.llm_engine.check_integrity()
    assert llm.llm_engine.pool.num_owned == 0
    found = [[(one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs] for output in outputs]
    return [tuple(one) for one in found]


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
    """Every third by itself of a kind that must be seen: of a penalty, of logprobs, forked."""
    kinds: list[dict[str, Any]] = [{"frequency_penalty": 0.7}, {"logprobs": 2}, {"n": 3}]
    return SamplingParams(max_tokens=2 + index % 9, seed=index, ignore_eos=True, **kinds[index // 3 % 3])


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
        return watched(index % 6)

    assert answers(llm, penalized) == answers(LLM(str(tiny_path)), penalized)
    assert not ahead
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
