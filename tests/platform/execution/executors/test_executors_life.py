"""Executors: life."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError
from quire.config import EngineConfig, ModelConfig
from quire.errors import AdapterError, WorkerDiedError
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.execution import remote as remotes
from quire.platform.execution import sharded
from quire.platform.execution.wire import pack, pack_error, unpack
from quire.platform.execution.worker_process import Answer, Place
from tests.lora import adapter_files
from tests.platform.execution.executors.helpers import GREEDY, ended, pids_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def test_a_worker_that_dies(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), executor="process", max_num_seqs=2)
    engine = llm.llm_engine
    for name in "abc":
        engine.add_request(name, "Once", GREEDY)
    engine.step()
    assert engine.executor.health_error() is None
    os.kill(pids_of(llm)[0], signal.SIGKILL)
    outputs = adapter_files.drive(engine)
    for name in "abc":
        assert outputs[name].outputs[0].finish_reason == "error"
        assert "WorkerDiedError: the worker's process has ended (signal 9)" in outputs[name].outputs[0].stop_reason
    assert engine.executor.health_error() == "the worker's process has ended (signal 9)"
    with pytest.raises(WorkerDiedError, match="signal 9"):
        llm.sleep()


def test_a_worker_that_hangs(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_path), executor="process")
    pid = pids_of(llm)[0]
    monkeypatch.setattr(remotes, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(remotes, "_LOOK_SECONDS", 0.1)
    os.kill(pid, signal.SIGSTOP)
    output = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and "has not answered for 0.2 s and was ended" in output.stop_reason
    assert ended(pid)


def test_a_worker_that_hangs_and_takes_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is larger than what the pipe holds does not wait for ever."""
    monkeypatch.setattr(remotes, "ANSWER_SECONDS", 0.2)
    executor = LLM(str(tiny_path), executor="process", skip_tokenizer_init=True).llm_engine.executor
    os.kill(executor.link.process.pid, signal.SIGSTOP)
    executor._post("large", bytes(10_000_000))  # no tiny model has such plans
    with pytest.raises(WorkerDiedError, match="has taken nothing for"):
        executor._send(None)
    assert ended(executor.link.process.pid)


class LostLink:
    """To a worker on a machine that has gone without closing a connection."""

    def __init__(self) -> None:
        self.steps, self.steps_there = Pipe()
        own, self.there = Pipe()
        self.errands = [own]
        self.gone: str | None = None

    def pixels(self, inputs: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def ending(self, seconds: float = 0) -> str | None:
        return self.gone

    def end(self) -> None:
        self.steps.close()


def test_who_waits_beside_the_steps_hears_of_the_end(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "_LOOK_SECONDS", 0.01)
    link = LostLink()
    config = EngineConfig(ModelConfig(str(tiny_path)))
    executor = remotes.RemoteExecutor(config, tiny_path, link, Place(0, 2, ()))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(executor.read, tiny_path)
        assert link.there.poll(60) and not reading.done()
        link.gone = "its node is gone"
        try:
            with pytest.raises(WorkerDiedError, match="its node is gone"):
                reading.result(60)
        finally:
            link.there.close()
    executor.close()


@dataclass(frozen=True)
class Facts:
    pool_bytes: int


class LastLink(LostLink):
    """To the last of several, which ends once it is asked for something, and the others with it."""

    others: Sequence[LostLink] = ()

    def ending(self, seconds: float = 0) -> str | None:
        if self.steps_there.poll():
            self.gone = "its node is gone"
            for other in self.others:
                other.gone = "it was killed"
        return self.gone


def test_the_one_that_has_ended_first_is_named(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "_LOOK_SECONDS", 0.01)
    first, last = LostLink(), LastLink()
    last.others = [first]
    workers = []
    for rank, link in enumerate((first, last)):
        config = EngineConfig(ModelConfig(str(tiny_path)))
        workers.append(remotes.RemoteExecutor(config, tiny_path, link, Place(rank, 2, ())))
        link.steps_there.recv_bytes()
        link.steps_there.send_bytes(pack(Answer(0, Facts(5))))
    executor = sharded.ShardedExecutor(workers)
    with pytest.raises(WorkerDiedError, match="process 1 of 2: its node is gone"):
        executor.check_memory()
    assert executor.health_error() == "process 1 of 2: its node is gone"


def test_a_process_that_is_forked_leaves_it_alone(remote: LLM) -> None:
    """What it does at its own end, or when it drops its copy of the engine."""
    child = os.fork()
    if not child:
        try:
            remote.llm_engine.executor.link.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert remote.generate("Once", GREEDY, use_tqdm=False)[0].finished


def test_ctrl_c_does_not_reach_it(remote: LLM) -> None:
    pid = pids_of(remote)[0]
    assert os.getsid(pid) != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    assert remote.generate("Once", GREEDY, use_tqdm=False)[0].finished


def test_an_engine_that_is_forgotten(tiny_path: Path) -> None:
    llm = LLM(str(tiny_path), executor="process", skip_tokenizer_init=True)
    pid = pids_of(llm)[0]
    del llm
    gc.collect()
    assert ended(pid)


def test_a_parent_that_is_killed(tiny_path: Path) -> None:
    program = (
        "import sys, time\nfrom quire import LLM\n"
        "llm = LLM(sys.argv[1], executor='process', skip_tokenizer_init=True)\n"
        "print(llm.llm_engine.executor.link.process.pid, flush=True)\ntime.sleep(60)\n"
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
