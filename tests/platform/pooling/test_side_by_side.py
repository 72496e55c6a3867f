"""Steps of prompts that generate nothing, computed by a thread each at the same time."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quire import LLM, LoRARequest, PoolingParams
from quire.platform.execution.model_runner import ModelRunner
from quire.platform.scheduling.plan import StepPlan
from tests.lora import adapter_files
from tests.models.pooling.worlds import engine, given, prompts
from tests.platform.pooling.test_pooling_promise import bert, llama, vectors

POOLED: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}
SECONDS = 60  # that something is waited for which comes at once, unless it never does
NAME = "quire-step"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return bert(tmp_path / "bert", torch.float32)


class Watch:
    """Around `ModelRunner.compute`: what is done first, and by which thread, of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Callable[[StepPlan], object] | None = None) -> None:
        self.names: list[str] = []
        compute = ModelRunner.compute

        def watched(runner: ModelRunner, plan: StepPlan, sequences: Sequence[Any]) -> Any:
            self.names.append(threading.current_thread().name)
            if first is not None:
                first(plan)
            return compute(runner, plan, sequences)

        monkeypatch.setattr(ModelRunner, "compute", watched)

    @property
    def beside(self) -> list[bool]:
        """Of each step, whether a thread computed it alone."""
        return [name.startswith(NAME) for name in self.names]


def test_they_are_computed_at_the_same_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first three waits for the others before it begins."""
    # Where freed blocks are poisoned, that waits for steps.
    llm = LLM(str(path), skip_tokenizer_init=True, max_num_seqs=64, max_num_batched_tokens=64, **POOLED)
    assert llm.llm_engine.executor.steps_at_once == 4
    batch = prompts(300, [60] * 6)
    expected = vectors(llm, batch)
    meeting, numbers = threading.Barrier(3), count()

    def meet(plan: StepPlan) -> None:
        if threading.current_thread().name.startswith(NAME) and next(numbers) < 3:
            meeting.wait(SECONDS)

    watch = Watch(monkeypatch, meet)
    assert all(map(torch.equal, vectors(llm, batch), expected))
    assert len(watch.beside) == 6 and sum(watch.beside) >= 3


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([60], {}),
        ([60, 60, 60, 60], {"max_num_seqs": 1}),
        ([60, 8], {}),
        ([60, 60, 60, 60], {"max_num_batched_tokens": 40}),  # each is longer than a step
    ],
    ids=["one", "one at a time", "little beside it", "long"],
)
def test_what_has_too_little_beside_it_has_all_threads(
    lengths: list[int], settings: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(path, **{"max_num_batched_tokens": 64, **settings}, **POOLED)
    watch = Watch(monkeypatch)
    vectors(llm, prompts(300, lengths))
    assert watch.names and not any(watch.beside)


def test_more_threads_than_take_turns_in_python(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(5)
    llm = engine(path, max_num_batched_tokens=64, **POOLED)
    assert llm.llm_engine.executor.steps_at_once == 1


def test_the_number_of_threads_is_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(path, max_num_batched_tokens=64, **POOLED)
    torch.set_num_threads(1)
    watch = Watch(monkeypatch)
    vectors(llm, prompts(300, [60] * 6))
    assert watch.names and not any(watch.beside)


@pytest.mark.parametrize("make", [bert, llama])
def test_the_same_bits(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that fit a step and such that do not, with beginnings in common, and with little room."""
    path = make(tmp_path, torch.bfloat16)
    start, *rest = prompts(300, [30, *range(1, 40)])
    batch = [*rest, *(start + one[:20] for one in rest)]
    torch.set_num_threads(1)
    alone = engine(path, enable_prefix_caching=False, **POOLED)
    assert alone.llm_engine.executor.steps_at_once == 1
    expected = vectors(alone, batch)
    torch.set_num_threads(3)
    watch = Watch(monkeypatch)
    for more in ({}, {"num_gpu_blocks_override": 40}, {"max_num_batched_tokens": 25}):
        llm = engine(path, max_num_seqs=16, debug=True, **{"max_num_batched_tokens": 128, **more}, **POOLED)
        for found in (vectors(llm, batch), vectors(llm, batch[::-1])[::-1]):
            assert all(map(torch.equal, found, expected))
        llm.llm_engine.check_integrity()
    assert any(watch.beside)


def test_parts_of_prompts_are_one_steps_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one too: the step behind it waits for it."""
    llm = engine(llama(tmp_path, torch.float32), max_num_batched_tokens=20, enable_prefix_caching=False, **POOLED)
    inside: list[int] = []
    whole: list[bool] = []  # of the steps that a thread computes alone: whether their chunks are prompts

    def look(plan: StepPlan) -> None:
        if threading.current_thread().name.startswith(NAME):
            whole.append(all(chunk.length == 18 for chunk in plan.chunks))
            inside.append(plan.number)
            time.sleep(0.02)
            inside.remove(plan.number)
        else:
            assert not inside

    Watch(monkeypatch, look)
    vectors(llm, prompts(300, [50, 50, *[18] * 6]))
    assert whole and all(whole)


def test_adapters_are_one_steps_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama(tmp_path / "llama", torch.float32)
    llm = engine(path, enable_lora=True, enable_prefix_caching=False, max_num_batched_tokens=30, **POOLED)
    llm.load_lora_adapter("one", str(adapter_files.plain(tmp_path / "adapter", 1)))
    batch = prompts(300, [30] * 12)
    named = [LoRARequest("one") if place in (5, 6) else None for place in range(12)]

    def ask(places: Sequence[int]) -> list[torch.Tensor]:
        chosen = [named[place] for place in places]
        outputs = llm.encode(given([batch[p] for p in places]), PoolingParams(), use_tqdm=False, lora_request=chosen)
        return [one.outputs.data for one in outputs]

    expected = [ask([place])[0] for place in range(12)]
    compute = ModelRunner.compute
    computed: list[
        tuple[bool, bool]
    ] = []  # of each step: whether it has the adapter, whether a thread is alone with it

    def look(runner: ModelRunner, plan: StepPlan, sequences: Sequence[Any]) -> Any:
        computed.append((any(one.adapters for one in sequences), threading.current_thread().name.startswith(NAME)))
        return compute(runner, plan, sequences)

    monkeypatch.setattr(ModelRunner, "compute", look)
    assert all(map(torch.equal, ask(range(12)), expected))
    assert (False, True) in computed and (True, False) in computed and (True, True) not in computed


def test_blocks_of_an_aborted_request_are_not_written_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that computes it goes on; who gets its blocks waits."""
    llm = LLM(str(path), skip_tokenizer_init=True, max_num_batched_tokens=64, num_gpu_blocks_override=64, **POOLED)
    batch = prompts(300, [60] * 5)
    expected = vectors(llm, batch)
    begun, compute = threading.Event(), ModelRunner.compute
    running: dict[int, set[int]] = {}  # blocks, by plan
    taken: list[set[int]] = []  # blocks of all steps
    together: list[set[int]] = []  # blocks of two steps at the same time

    def slow(runner: ModelRunner, plan: StepPlan, sequences: Sequence[Any]) -> Any:
        own = {block for one in sequences for block in one.block_ids}
        together.extend(own & blocks for blocks in list(running.values()))
        running[plan.number] = own
        taken.append(own)
        begun.set()
        time.sleep(0.2)
        try:
            return compute(runner, plan, sequences)
        finally:
            del running[plan.number]

    monkeypatch.setattr(ModelRunner, "compute", slow)
    for name, ids in zip("abcde", batch, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, PoolingParams())
    llm.llm_engine.step()
    assert begun.wait(SECONDS) and running
    llm.llm_engine.abort_request("a")
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[output.request_id] = output.outputs.data
    assert sorted(found) == ["b", "c", "d", "e"]
    assert all(torch.equal(found[name], expected["abcde".index(name)]) for name in "bcde")
    assert taken[0] & taken[1], "the blocks of the request that was aborted"
    assert not any(together)
    llm.llm_engine.check_integrity()


def test_one_that_fails_harms_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(path, max_num_batched_tokens=64, **POOLED)
    batch = prompts(300, [60, 58, 57, 56, 55, 54])
    expected = vectors(llm, batch)

    def fail(plan: StepPlan) -> None:
        if any(chunk.length == 57 for chunk in plan.chunks):
            raise RuntimeError("this one is cursed")

    watch = Watch(monkeypatch, fail)
    outputs = llm.encode(given(batch), PoolingParams(), use_tqdm=False)
    assert "cursed" in str(outputs[2].failure)
    assert all(torch.equal(outputs[i].outputs.data, expected[i]) for i in (0, 1, 3, 4, 5))
    assert any(watch.beside)
    llm.llm_engine.check_integrity()


def test_memory_is_not_given_back_under_a_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests were aborted, and what computes them has not ended."""
    llm = LLM(str(path), skip_tokenizer_init=True, max_num_batched_tokens=64, **POOLED)
    batch = prompts(300, [60] * 5)
    expected = vectors(llm, batch)
    compute, memory = ModelRunner.compute, cast(Any, llm.llm_engine.executor).worker.memory
    give_back, running, ended = memory.give_back, [], []

    def slow(runner: ModelRunner, plan: StepPlan, sequences: Sequence[Any]) -> Any:
        running.append(plan.number)
        time.sleep(0.2)
        try:
            return compute(runner, plan, sequences)
        finally:
            running.remove(plan.number)
            ended.append(plan.number)

    def give() -> None:
        assert not running
        give_back()

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute", slow)
        patch.setattr(memory, "give_back", give)
        for name, ids in zip("abcde", batch, strict=True):
            llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, PoolingParams())
        llm.llm_engine.step()
        assert not ended, "it goes on"
        llm.llm_engine.abort_request(list("abcde"))
        llm.sleep(level=1)
        assert ended
        llm.wake_up()
    assert all(map(torch.equal, vectors(llm, batch), expected))


@pytest.mark.parametrize("closes", [True, False])
def test_threads_end_with_the_engine(path: Path, closes: bool) -> None:
    before = set(threading.enumerate())
    llm: LLM | None = engine(path, max_num_batched_tokens=64, **POOLED)
    assert llm is not None
    vectors(llm, prompts(300, [60] * 5))
    own = [one for one in threading.enumerate() if one not in before and one.name.startswith(NAME)]
    assert len(own) == 3
    if closes:
        llm.llm_engine.close()
    llm = None
    gc.collect()
    for thread in own:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in own)


SCRIPT = """
import os, signal, sys, threading, time
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
torch.set_num_threads(3)
from quire import LLM, PoolingParams
from quire.platform.execution.model_runner import ModelRunner
llm = LLM(sys.argv[1], runner="pooling", skip_tokenizer_init=True, max_num_batched_tokens=64)
compute, begun = ModelRunner.compute, threading.Event()
def slow(self, plan, sequences):
    begun.set()
    for _ in range(20):
        result = compute(self, plan, sequences)
        time.sleep(0.01)
    return result
ModelRunner.compute = slow
def interrupt():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
prompts = [{"prompt_token_ids": [3 + number] * 60} for number in range(30)]
if sys.argv[2] == "interrupt":
    threading.Thread(target=interrupt, daemon=True).start()
    llm.encode(prompts, PoolingParams(), use_tqdm=False)
for number, prompt in enumerate(prompts):
    llm.llm_engine.add_request(str(number), prompt, PoolingParams())
for _ in range(2):
    llm.llm_engine.step()
"""


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_a_program_ends_while_steps_run(path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), how], capture_output=True, text=True, timeout=300)
    if how == "interrupt":
        assert done.returncode in (1, 130, -signal.SIGINT) and "KeyboardInterrupt" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
