"""A worker in a process of its own gives what one in this process gives, bit by bit; and what becomes of it."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from quire import LLM, BeamSearchParams, LoRARequest, QuireError, SamplingParams
from quire.config import EngineConfig, ModelConfig
from quire.errors import AdapterError, WorkerDiedError
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.execution import process
from quire.platform.execution.wire import pack_error, unpack
from tests.lora import adapter_files
from tests.multimodal import open_engine, tiny_vision
from tests.multimodal.test_image_promise import answers as image_answers
from tests.multimodal.test_image_promise import requests as image_requests
from tests.platform.engine import test_engine_parity as parity
from tests.platform.engine import test_promise as promise

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 40, "debug": True}
UNKNOWN = process.RemoteAdapter(99, b"", 0, 0, False, (), False)  # of whose handle a worker knows nothing
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ended(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


def pid_of(llm: LLM) -> int:
    return llm.llm_engine.executor._process.pid  # nobody else needs it


@pytest.fixture(scope="module")
def remote(tiny_path: Path) -> Iterator[LLM]:
    """Shared: on a pool so small that sequences are preempted."""
    llm = LLM(str(tiny_path), executor="process", enable_lora=True, **SMALL)
    yield llm
    llm.llm_engine.close()
    assert ended(pid_of(llm))


@pytest.fixture(scope="module")
def local(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), enable_lora=True, **SMALL)


# -- the same bits --------------------------------------------------------------------------------------------------


def test_the_promise(remote: LLM, local: LLM) -> None:
    """Logprobs, prompt logprobs, penalties and filters, in a crowd that is preempted, twice: with prefix hits then."""
    chosen = list(range(promise.REQUESTS))
    expected = promise.answers(local, chosen)
    for _ in range(2):
        assert promise.answers(remote, chosen) == expected
    assert remote.llm_engine.scheduler.num_preemptions > 0


def test_transformers(remote: LLM, tiny_path: Path) -> None:
    oracle = LlamaForCausalLM.from_pretrained(tiny_path).double().eval()
    batch = promise.prompts(6)
    outputs = remote.generate([{"prompt_token_ids": ids} for ids in batch], GREEDY, use_tqdm=False)
    for ids, output in zip(batch, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert parity.by_transformers(oracle, ids, answer, "gqa")[0] == answer


def test_forks_and_beams(remote: LLM, local: LLM) -> None:
    params = [
        SamplingParams(n=3, temperature=1.0, seed=i, max_tokens=5 + i, logprobs=2, frequency_penalty=0.5)
        for i in range(5)
    ]
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(5)]

    def run(llm: LLM) -> Any:
        forks = llm.generate(batch, params, use_tqdm=False)
        beams = llm.beam_search(batch, BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
        return [[(c.token_ids, c.logprobs) for c in o.outputs] for o in forks], [o.sequences for o in beams]

    assert run(remote) == run(local)


def test_stop_strings_and_aborts(remote: LLM, local: LLM) -> None:
    whole = local.generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[whole[2:4]])
    found = [llm.generate("Once upon", stop, use_tqdm=False)[0].outputs[0] for llm in (remote, local)]
    assert found[0].text == found[1].text and found[0].stop_reason == whole[2:4]
    engine = remote.llm_engine
    for name in "abcd":
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    engine.abort_request(["a", "c"])
    engine.step()
    engine.abort_request(["b", "d"])
    assert promise.answers(remote, [3, 4]) == promise.answers(local, [3, 4])


@pytest.mark.parametrize("kind", open_engine.KINDS[::2], ids=lambda kind: kind.name)
def test_images(tmp_path: Path, kind: Any) -> None:
    """Features that come and go, pixels by way of shared memory; the model with three positions a token among them."""
    tiny_vision.build(kind.architecture, kind.variant, tmp_path)
    more = {"media_cache_bytes": open_engine.room_for(kind.most_tokens), "max_num_batched_tokens": 23}
    expected = image_answers(open_engine.open_llm(str(tmp_path), **more), image_requests())
    llm = open_engine.open_llm(str(tmp_path), executor="process", **more)
    assert image_answers(llm, image_requests()) == expected
    assert image_answers(llm, image_requests()[::-1]) == expected[::-1]
    llm.llm_engine.close()


def test_adapters(remote: LLM, local: LLM, tmp_path: Path) -> None:
    """Of all kinds, mixed, reloaded and unloaded while they run; one that does not fit is refused as here."""
    folders = {
        "plain": adapter_files.plain(tmp_path / "plain", 1),
        "dora": adapter_files.dora(tmp_path / "dora", 4),
        "saved": adapter_files.saved(tmp_path / "saved", 5),
        "words": adapter_files.words(tmp_path / "words", 6),
    }
    again = adapter_files.plain(tmp_path / "again", 9, rank=7, targets=adapter_files.ALL)
    wrong = adapter_files.write(tmp_path / "wrong", adapter_files.config(), b"nothing")
    batch = [{"prompt_token_ids": ids} for ids in promise.prompts(10)]
    mix = LoRARequest("mix", adapters=[("plain", 0.5), ("other", -1.0)])
    wanted = [None, *map(LoRARequest, folders), mix, LoRARequest("other"), None, LoRARequest("dora"), mix]
    params = [promise.params(i) for i in range(10)]

    def run(llm: LLM) -> list[Any]:
        for name, folder in folders.items():
            llm.load_lora_adapter(name, str(folder))
        llm.load_lora_adapter("other", str(again))
        found = [[(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs)
                  for o in llm.generate(batch, params, lora_request=wanted, use_tqdm=False)]]  # fmt: skip
        engine = llm.llm_engine
        engine.add_request("runs", batch[0], GREEDY, LoRARequest("plain"))
        engine.step()
        llm.load_lora_adapter("plain", str(again), load_inplace=True)
        found.append([list(adapter_files.drive(engine)["runs"].outputs[0].token_ids)])
        found.append(adapter_files.tokens(llm, [ids["prompt_token_ids"] for ids in batch[:1]], LoRARequest("plain")))
        with pytest.raises(AdapterError) as error:
            llm.load_lora_adapter("wrong", str(wrong))
        found.append(str(error.value))
        adapter_files.nothing_left(llm)
        for name in [*folders, "other"]:
            llm.unload_lora_adapter(name)
        assert llm.list_lora_adapters() == []
        return found

    expected = run(local)
    assert run(remote) == expected
    assert expected[1] != expected[2]
    gc.collect()
    remote.generate(batch[:1], GREEDY, use_tqdm=False)
    assert not remote.llm_engine.executor._forgotten, "the worker was not told which adapters are gone"


def test_an_adapter_that_is_unloaded_leaves_the_worker_too(remote: LLM, tmp_path: Path) -> None:
    """Though no request comes: what `freed_bytes` says is given back over there as well."""
    engine = remote.llm_engine
    gc.collect()  # adapters that other tests were refused
    engine.core.settle()
    remote.load_lora_adapter("gone", str(adapter_files.plain(tmp_path / "gone", 1)))
    remote.generate("a", GREEDY, lora_request=LoRARequest("gone"), use_tqdm=False)
    number = engine.unload_lora_adapter("gone")
    engine.core.settle()
    assert engine.freed_bytes(number)
    assert not engine.executor._forgotten, "the worker was not told"


def test_sleep(remote: LLM, local: LLM) -> None:
    expected = promise.answers(local, [0, 1, 2])
    assert promise.answers(remote, [0, 1, 2]) == expected
    remote.sleep()
    with pytest.raises(QuireError, match="sleeps"):
        remote.generate("a", GREEDY, use_tqdm=False)
    remote.wake_up()
    assert promise.answers(remote, [0, 1, 2]) == expected


def test_one_request_fails_in_the_worker(remote: LLM, local: LLM) -> None:
    """A kernel refuses a token: the step runs again, one sequence at a time, and the others go on."""
    engine = remote.llm_engine
    for name in "abc":
        engine.add_request(name, {"prompt_token_ids": [5, 6, 7 + ord(name)]}, GREEDY)
    engine.step()
    engine.scheduler.running[1].token_ids[-1] = 10_000
    outputs = adapter_files.drive(engine)
    assert [outputs[name].outputs[0].finish_reason for name in "abc"] == ["length", "error", "length"]
    assert "ids" in outputs["b"].outputs[0].stop_reason
    alone = local.generate({"prompt_token_ids": [5, 6, 7 + ord("c")]}, GREEDY, use_tqdm=False)[0].outputs[0]
    assert outputs["c"].outputs[0].token_ids == alone.token_ids
    # And a row that cannot be drawn, which fails no step.
    nothing = SamplingParams(max_tokens=3, min_tokens=2, allowed_token_ids=[2])
    one, other = remote.generate(["a", "b"], [nothing, GREEDY], use_tqdm=False)
    assert one.outputs[0].finish_reason == "error" and "no token" in one.outputs[0].stop_reason
    assert other.outputs[0].finish_reason == "length"


# -- plans ----------------------------------------------------------------------------------------------------------


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
        assert ended(pid_of(llm))
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


# -- life -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), executor="process", max_num_seqs=2)
    engine = llm.llm_engine
    for name in "abc":
        engine.add_request(name, "Once", GREEDY)
    engine.step()
    assert engine.executor.health_error() is None
    os.kill(pid_of(llm), signal.SIGKILL)
    outputs = adapter_files.drive(engine)
    for name in "abc":
        assert outputs[name].outputs[0].finish_reason == "error"
        assert "WorkerDiedError: the worker's process has ended (signal 9)" in outputs[name].outputs[0].stop_reason
    assert engine.executor.health_error() == "the worker's process has ended (signal 9)"
    with pytest.raises(WorkerDiedError, match="signal 9"):
        llm.sleep()


def test_a_worker_that_hangs(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_path), executor="process")
    pid = pid_of(llm)
    monkeypatch.setattr(process, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(process, "_LOOK_SECONDS", 0.1)
    os.kill(pid, signal.SIGSTOP)
    output = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and "has not answered for 0.2 s and was ended" in output.stop_reason
    assert ended(pid)


def test_a_worker_that_hangs_and_takes_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is larger than what the pipe holds does not wait for ever."""
    monkeypatch.setattr(process, "_ANSWER_SECONDS", 0.2)
    executor = LLM(str(tiny_path), executor="process", skip_tokenizer_init=True).llm_engine.executor
    os.kill(executor._process.pid, signal.SIGSTOP)
    executor._post("large", bytes(10_000_000))  # no tiny model has such plans
    with pytest.raises(WorkerDiedError, match="has taken nothing for"):
        executor._send(None)
    assert ended(executor._process.pid)


def test_a_process_that_is_forked_leaves_it_alone(remote: LLM) -> None:
    """What it does at its own end, or when it drops its copy of the engine."""
    child = os.fork()
    if not child:
        try:
            remote.llm_engine.executor._end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert remote.generate("Once", GREEDY, use_tqdm=False)[0].finished


def test_ctrl_c_does_not_reach_it(remote: LLM) -> None:
    pid = pid_of(remote)
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    assert remote.generate("Once", GREEDY, use_tqdm=False)[0].finished


def test_an_engine_that_is_forgotten(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), executor="process", skip_tokenizer_init=True)
    pid = pid_of(llm)
    del llm
    gc.collect()
    assert ended(pid)


def test_a_parent_that_is_killed(tiny_path: Path) -> None:
    program = (
        "import sys, time\nfrom quire import LLM\n"
        "llm = LLM(sys.argv[1], executor='process', skip_tokenizer_init=True)\n"
        "print(llm.llm_engine.executor._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tiny_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert ended(pid)


def test_health(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says what its executor says."""
    engine = AsyncEngine(EngineConfig(ModelConfig(str(tiny_path))))

    async def ask() -> list[str | None]:
        await engine.start()
        said = [engine.step_loop.health_error(60)]
        monkeypatch.setattr(engine.llm_engine.executor, "health_error", lambda: "the worker's process has ended")
        said.append(engine.step_loop.health_error(60))
        await engine.close()
        return said

    assert asyncio.run(ask()) == [None, "the worker's process has ended"]


def test_what_cannot_be_loaded(tiny_path: Path) -> None:
    """The worker's errors are those of this process."""

    def why(**settings: Any) -> str:
        with pytest.raises(QuireError) as error:
            LLM(str(tiny_path), **settings)
        return f"{type(error.value).__name__}: {error.value}"

    assert why(max_model_len=10_000) == why(max_model_len=10_000, executor="process")
    assert "a setting cannot be sent to another process" in why(executor="process", hf_overrides={"a": lambda: 1})
    assert "executor='ray'" in why(executor="ray")


def test_errors_that_do_not_travel() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    assert repr(unpack(pack_error(Odd(1, 2)))) == "RuntimeError('Odd: 1 and 2')"
    error = unpack(pack_error(AdapterError("no")))
    assert type(error) is AdapterError and "worker's process" in error.__notes__[0]
