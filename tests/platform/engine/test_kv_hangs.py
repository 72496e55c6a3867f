"""A disk that answers no more: the engine ends, the process ends, and the folder stays locked as long as it may be
written to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError, SamplingParams
from quire.platform.execution import kv_transfer
from quire.platform.execution.daemon_threads import DaemonThreads
from quire.platform.kv import disk, transfers
from tests.platform.engine.kept import HangingConnector, engine, on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
LONG = {"prompt_token_ids": [3 + place % 300 for place in range(60)]}


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HangingConnector]]:
    for name in ("begun", "go", "closed"):
        monkeypatch.setattr(HangingConnector, name, threading.Event())
    for name in ("kept", "hangs"):
        monkeypatch.setattr(HangingConnector, name, type(getattr(HangingConnector, name))())
    yield HangingConnector
    HangingConnector.go.set()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(kv_transfer, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("quire.platform.engine.core.WRITE_SECONDS", 0.05)
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.05)


def by(name: str) -> dict[str, Any]:
    connector = f"tests.platform.engine.kept:{name}"
    return {"kv_transfer_config": {"kv_connector": connector, "kv_connector_extra_config": {"min_tokens": 1}}}


def generate(llm: LLM) -> Any:
    return llm.generate(LONG, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_engine_ends(
    kind: str,
    tiny_path: Path,
    hanging: type[HangingConnector],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    expected = generate(LLM(str(tiny_path)))
    llm = LLM(str(tiny_path), **by("HangingConnector"))
    assert generate(llm) == expected
    llm.llm_engine.executor.take_transfers(60.0)
    llm.llm_engine.close()
    assert hanging.kept and hanging.closed.is_set() and "not waited for" not in caplog.text
    hanging.closed.clear()
    request.getfixturevalue("soon")  # from now on: the first engine hangs in nothing
    if kind == "write":
        hanging.kept.clear()
    hanging.hangs.add(kind)
    llm = LLM(str(tiny_path), **by("HangingConnector"))
    assert generate(llm) == expected
    assert hanging.begun.wait(60)
    llm.llm_engine.close()
    assert caplog.text.count("/a/folder: reading or writing KV blocks has not ended within 0.05 s") == 1
    assert not hanging.closed.is_set(), "something is under way yet"
    hanging.go.set()
    assert hanging.closed.wait(60)


@pytest.mark.usefixtures("soon")
def test_the_folder_is_locked_while_a_file_may_be_written(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, begun, go = os.open, threading.Event(), threading.Event()

    def hangs(path: Any, *given: Any) -> int:
        if str(path).endswith(".new"):
            begun.set()
            go.wait()
        return opened(path, *given)

    monkeypatch.setattr(disk.os, "open", hangs)
    with engine(tiny_path, tmp_path) as llm:
        generate(llm)
        assert begun.wait(60)
    with pytest.raises(QuireError, match="another engine has it"):
        LLM(str(tiny_path), **on_disk(tmp_path))
    closing = [thread for thread in threading.enumerate() if thread.name == "quire-kv-close"]
    go.set()
    for thread in closing:
        thread.join(60)
    with engine(tiny_path, tmp_path):
        pass


_PROGRAM = """
import sys
from quire import LLM, SamplingParams
from quire.platform.execution import kv_transfer
from tests.platform.engine.kept import HangingConnector
kv_transfer._CLOSE_SECONDS = kv_transfer.WRITE_SECONDS = 0.1
path, closes = sys.argv[1:]
config = {"kv_connector": "tests.platform.engine.kept:HangingConnector",
          "kv_connector_extra_config": {"min_tokens": 1}}
HangingConnector.hangs.add("write")
llm = LLM(path, skip_tokenizer_init=True, kv_transfer_config=config)
llm.generate({"prompt_token_ids": list(range(3, 60))}, SamplingParams(max_tokens=3, detokenize=False), use_tqdm=False)
assert HangingConnector.begun.wait(60)
if closes == "closes":
    import quire.platform.engine.core as core
    core.WRITE_SECONDS = 0.1
    llm.llm_engine.close()
print("the last line")
"""


@pytest.mark.parametrize("closes", ["closes", pytest.param("leaves", marks=pytest.mark.slow)])
def test_a_process_ends(closes: str, tiny_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tiny_path), closes], capture_output=True, text=True, timeout=120, cwd=root
    )
    assert done.returncode == 0 and done.stdout == "the last line\n", done.stderr
    assert "/a/folder: reading or writing KV blocks has not ended" in done.stderr


_WRITES = """
import sys, time
from quire.platform.execution import kv_transfer
from tests.platform.engine.kept import MemoryConnector
class Slow(MemoryConnector):
    def __init__(self): pass
    def write(self, key, block):
        time.sleep(0.05)
        print(key.decode(), flush=True)
        return True, []
class Blocks:
    bytes_a_block = 4
    def gather(self, blocks):
        import torch
        return torch.zeros(len(blocks), 4, dtype=torch.uint8)
Slow.held = lambda self: []
kv_transfer.WRITE_SECONDS = 60.0
moves = kv_transfer.KVTransfer(Slow(), Blocks(), 100)
moves.store(kv_transfer.Transfers(store=((b"a", 0), (b"b", 1))))
moves.store(kv_transfer.Transfers(store=((b"c", 0),)))
"""


def test_a_program_that_ends_waits_for_what_is_to_be_written() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", _WRITES], capture_output=True, text=True, timeout=120, cwd=root)
    assert (done.returncode, done.stdout) == (0, "a\nb\nc\n"), done.stderr


def test_threads() -> None:
    begun, go, done = threading.Event(), threading.Event(), []
    threads = DaemonThreads(1, "some")
    assert DaemonThreads(1, "none").end(0.0), "nothing has begun"

    def wait() -> None:
        begun.set()
        go.wait()
        done.append(1)

    threads.submit(wait)
    assert begun.wait(60)
    for number in (2, 3):
        threads.submit(lambda number=number: done.append(number))
    threads.give_up()
    threads.submit(lambda: done.append(4))
    assert not threads.end(0.0) and done == []
    go.set()
    assert threads.end() and done == [1, 4]
