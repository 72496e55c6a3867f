"""Executors: plans."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.errors import WorkerDiedError
from quire.lora.adapter import Bound
from quire.platform.execution.remote import RemoteAdapter
from tests.lora import adapter_files
from tests.multimodal import open_engine, tiny_vision
from tests.multimodal.test_image_promise import answers as image_answers
from tests.multimodal.test_image_promise import requests as image_requests
from tests.platform.engine import test_promise as promise
from tests.platform.execution.executors.helpers import GREEDY, ended, pids_of

pytestmark = pytest.mark.usefixtures("one_thread")

UNKNOWN = RemoteAdapter(99, b"", 0, 0, False, (), False, Bound())  # of whose handle a worker knows nothing


def plain_data(value: Any) -> bool:
    """Whether it is made of tuples, of what never changes and of frozen classes."""
    if isinstance(value, tuple):
        return all(map(plain_data, value))
    if isinstance(value, SamplingParams):  # the caller's own, copied when the request came
        return True
    if hasattr(value, "__dataclass_fields__"):
        return value.__dataclass_params__.frozen and all(plain_data(getattr(value, f)) for f in value.__slots__)
    return value is None or isinstance(value, (int, float, bytes, str, frozenset))


def test_plans_are_data(local: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pickle, equal what comes back, and nothing in them can change; a prompt is in one of them only."""
    plans, prepare = [], local.llm_engine.executor.runner.prepare

    def watched(plan: Any) -> None:
        plans.append((plan, pickle.dumps(plan)))
        prepare(plan)

    monkeypatch.setattr(local.llm_engine.executor.runner, "prepare", watched)
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(12)]
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    local.generate(batch, params, use_tqdm=False)
    assert len(plans) > 10
    for plan, data in plans:
        assert plain_data(plan) and pickle.loads(data) == plan
        assert pickle.dumps(plan) == data, "a plan has changed behind its worker's back"
    new = [new.sequence_id for plan, _ in plans for new in plan.new]
    assert len(new) == len(set(new)) == 12 and sum(len(plan.forks) for plan, _ in plans) == 12
    sent = sum(len(chunk.token_ids) for plan, _ in plans for chunk in plan.chunks)
    assert sent == 24 * 11, "each token but the last, once"


def test_a_plan_that_is_interrupted(tiny_path: Path, local: LLM) -> None:
    """Whether the worker has had it or not, the next one makes up for it: no token is missing, and none is twice."""
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(6)]
    params = [SamplingParams(n=1 + i % 2, temperature=1.0, seed=i, max_tokens=9, ignore_eos=True) for i in range(6)]
    expected = [[list(c.token_ids) for c in o.outputs] for o in local.generate(batch, params, use_tqdm=False)]
    for where, reached in (("in_process", True), ("in_process", False), ("process", True)):
        llm = LLM(str(tiny_path), executor=where, debug=True, num_gpu_blocks_override=200)
        lost = interrupt(llm, reached)
        engine, found = llm.llm_engine, {}
        for i in range(6):
            engine.add_request(str(i), batch[i], params[i])
        while engine.has_unfinished_requests():
            try:
                found.update({o.request_id: o for o in engine.step()})
            except KeyboardInterrupt:
                continue
        assert [[list(c.token_ids) for c in found[str(i)].outputs] for i in range(6)] == expected
        assert len(lost) > 3
        engine.close()


@pytest.mark.parametrize("reached", [True, False])
def test_beams_and_a_plan_that_is_interrupted(tiny_path: Path, local: LLM, reached: bool) -> None:
    """A beam that was forked from one which has ended, with the plan that was lost."""
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(4)]
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    expected = [[one.tokens for one in output.sequences] for output in local.beam_search(batch, params)]
    llm = LLM(str(tiny_path), debug=True, block_size=1, num_gpu_blocks_override=2000)  # whose forks copy nothing
    lost = interrupt(llm, reached)
    engine, found = llm.llm_engine, {}
    for i, prompt in enumerate(batch):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        try:
            found.update({o.request_id: o for o in engine.step()})
        except KeyboardInterrupt:
            continue
    assert [[one.tokens for one in found[str(i)].sequences] for i in range(4)] == expected
    assert any(plan.forks and plan.ended for plan in lost)
    del engine.executor.prepare
    engine.core.settle()
    assert len(engine.executor.runner._sequences) == 0, "the worker has forgotten none of them"


def test_images_and_a_step_that_is_interrupted(tmp_path: Path) -> None:
    """After it was planned, and before anything was encoded: that is then made up for."""
    kind = open_engine.KINDS[0]
    tiny_vision.build(kind.architecture, kind.variant, tmp_path)
    expected = image_answers(open_engine.open_llm(str(tmp_path)), image_requests())
    llm = open_engine.open_llm(str(tmp_path), media_cache_bytes=open_engine.room_for(kind.most_tokens))
    engine, calls = llm.llm_engine, []
    step, execute = engine.step, engine.executor.execute

    def interrupted(plan: Any) -> Any:
        calls.append(plan)
        if plan.encode and len(calls) % 2:
            raise KeyboardInterrupt
        return execute(plan)

    def again() -> list[Any]:
        try:
            return step()
        except KeyboardInterrupt:
            return []

    engine.executor.execute, engine.step = interrupted, again
    assert image_answers(llm, image_requests()) == expected
    assert sum(bool(plan.encode) for plan in calls[::2]) > 2


@pytest.mark.usefixtures("foreground")
def test_an_interrupt_waits_until_the_worker_has_the_plan(local: LLM) -> None:
    engine, planned = local.llm_engine, []
    plan = engine.scheduler.plan

    def pressed() -> Any:
        signal.raise_signal(signal.SIGINT)
        planned.append(plan())
        return planned[-1]

    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    engine.scheduler.plan = pressed
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        del engine.scheduler.plan
    assert planned[0].new[0].sequence_id in engine.executor.runner._sequences._known
    expected = local.llm_engine.executor.facts.num_blocks, [GREEDY.max_tokens]
    output = adapter_files.drive(engine)["a"].outputs[0]
    assert (engine.pool.num_free, [len(output.token_ids)]) == expected


@pytest.mark.parametrize("where", ["in_process", "process"])
def test_a_plan_that_cannot_be_taken_in(tiny_path: Path, tmp_path: Path, where: str) -> None:
    """Where it moves blocks or adapters, what comes later would be wrong: the engine says so, and computes nothing."""
    folder = adapter_files.plain(tmp_path / "a", 1)
    llm = LLM(str(tiny_path), executor=where, enable_lora=True)
    engine = llm.llm_engine
    llm.load_lora_adapter("a", str(folder))
    assert llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    engine.executor.connect_adapters(lambda uid: UNKNOWN if where == "process" else {}[uid])
    why = "could not be taken in"
    if where == "in_process":
        with pytest.raises(KeyError):
            llm.generate("Once", GREEDY, lora_request=LoRARequest("a"), use_tqdm=False)
        with pytest.raises(WorkerDiedError, match=why):
            llm.generate("Once", GREEDY, use_tqdm=False)
    else:
        for adapter in (LoRARequest("a"), None):
            output = llm.generate("Once", GREEDY, lora_request=adapter, use_tqdm=False)[0].outputs[0]
            assert output.finish_reason == "error" and why in output.stop_reason
        assert all(ended(pid) for pid in pids_of(llm))
    assert why in engine.executor.health_error()
    engine.close()


def interrupt(llm: LLM, reached: bool) -> list[Any]:
    """Let every third plan be interrupted, before the worker has it or just after. Takes those."""
    executor, calls, lost = llm.llm_engine.executor, [], []
    prepare = executor.prepare

    def interrupted(plan: Any) -> None:
        calls.append(plan)
        if plan.moves or len(calls) % 3:
            return prepare(plan)
        if reached:
            prepare(plan)
        lost.append(plan)
        raise KeyboardInterrupt

    executor.prepare = interrupted
    return lost
