"""Errands (reading adapters, compiling grammars) are waited for as long as a step, and no longer."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM
from quire.config import EngineConfig, ModelConfig
from quire.errors import WorkerDiedError
from quire.platform.execution import remote
from quire.platform.execution.wire import pack, unpack
from quire.platform.execution.worker_process import Place
from tests.platform.execution.executors.helpers import ended, pids_of
from tests.platform.execution.executors.test_executors_life import LostLink

pytestmark = pytest.mark.usefixtures("one_thread")


class SilentLink(LostLink):
    """To a worker that lives and does not answer."""

    def end(self) -> None:
        super().end()
        self.gone = "it was killed"


@pytest.fixture
def executor(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> remote.RemoteExecutor:
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.1)
    config = EngineConfig(ModelConfig(str(tiny_path)))
    return remote.RemoteExecutor(config, tiny_path, SilentLink(), Place(0, 2, ()))


def test_a_worker_that_does_not_answer_an_errand(executor: remote.RemoteExecutor, tiny_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match=r"has not answered for 0\.1 s, asked to read an adapter, and was ended"):
        executor.read(tiny_path)
    assert unpack(executor.link.there.recv_bytes()) == ("read", (str(tiny_path),))
    assert "asked to read an adapter" in str(executor.health_error()) and executor.link.gone == "it was killed"
    with pytest.raises(WorkerDiedError, match="asked to read an adapter"):
        executor.check_memory()


def test_an_engine_that_was_stopped_itself(
    executor: remote.RemoteExecutor, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer came while it could not look."""
    channel = executor._idle.get()

    class Stopped:
        send_bytes, recv_bytes = channel.send_bytes, channel.recv_bytes

        def poll(self, seconds: float) -> bool:
            if seconds == 0 or channel.poll(0):
                return channel.poll(0)
            executor.link.there.send_bytes(pack(((1, "handle"), None)))
            monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: math.inf))
            return False

    executor._idle.put(Stopped())  # type: ignore[arg-type]
    assert executor._errand("read", "folder") == (1, "handle")
    assert executor.health_error() is None


def test_one_that_takes_nothing(executor: remote.RemoteExecutor) -> None:
    grammars = executor.remote_grammars()
    large: Any = bytes(10_000_000)
    with pytest.raises(WorkerDiedError, match="asked to compile a grammar"):
        grammars.compile(b"digest", large)


def test_half_an_answer(executor: remote.RemoteExecutor, tiny_path: Path) -> None:
    os.write(executor.link.there.fileno(), (1000).to_bytes(4, "big") + b"the beginning")
    with pytest.raises(WorkerDiedError, match="asked to read an adapter"):
        executor.read(tiny_path)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"executor": "process"}, {"tensor_parallel_size": 2}], ids=["one", "several"])
def test_a_process_that_hangs(settings: dict[str, Any], tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_path), enable_lora=True, skip_tokenizer_init=True, **settings)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.05)
    pids, executor = pids_of(llm), llm.llm_engine.executor
    os.kill(pids[0], signal.SIGSTOP)
    while "\nState:\tT" not in Path(f"/proc/{pids[0]}/status").read_text():
        time.sleep(0.01)
    with pytest.raises(WorkerDiedError, match="asked to read an adapter, and was ended"):
        executor.adapter_reader().read(tiny_path / "adapter")
    assert "asked to read an adapter" in str(executor.health_error())
    assert all(ended(pid) for pid in pids)
