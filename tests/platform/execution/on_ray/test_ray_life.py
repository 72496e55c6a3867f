"""Workers that are Ray's actors: how they start, and what becomes of the engine when one ends."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError
from quire.errors import WorkerDiedError
from quire.platform.execution import ray_executor, remote
from quire.platform.execution.worker_process import Place
from tests.lora import adapter_files
from tests.platform.execution.executors.helpers import GREEDY, ended
from tests.platform.execution.on_ray.conftest import WHERE, free_cpus, members_of
from tests.server.api_server import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread", "cluster")]


def open_llm(path: Path, where: str, **settings: Any) -> LLM:
    return LLM(str(path), distributed_executor_backend="ray", **{**WHERE[where], **settings})


@pytest.fixture(autouse=True)
def all_is_given_back(cluster: Any) -> Iterator[None]:
    yield
    assert free_cpus() == 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["one node", "two nodes"])
def test_one_that_dies_ends_all(tiny_path: Path, where: str, rank: int) -> None:
    llm = open_llm(tiny_path, where, max_num_seqs=2, enable_lora=True)
    engine, members = llm.llm_engine, members_of(llm)
    llm.load_lora_adapter("one", str(adapter_files.plain(tiny_path.parent / "adapter", 1)))
    for name in "abc":
        engine.add_request(name, "Once", GREEDY)
    engine.step()
    os.kill(members[rank].pid, signal.SIGKILL)
    outputs = adapter_files.drive(engine)
    for name in "abc":
        assert outputs[name].outputs[0].finish_reason == "error"
        assert f"process {rank} of 2: the worker's actor has ended" in outputs[name].outputs[0].stop_reason
    assert "The actor died unexpectedly" in engine.executor.health_error()
    assert all(ended(member.pid) for member in members)
    adapter_files.nothing_left(llm)
    with pytest.raises(WorkerDiedError, match="has ended"):
        llm.sleep()


@pytest.mark.parametrize("where", ["one node", "stages"])
def test_memory_is_shared_by_those_of_a_machine(tiny_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of Ray's nodes are on this one."""
    places: list[Place] = []

    def place(*given: Any, **named: Any) -> Place:
        places.append(Place(*given, **named))
        return places[-1]

    monkeypatch.setattr(ray_executor, "Place", place)
    open_llm(tiny_path, where, skip_tokenizer_init=True).llm_engine.close()
    assert [one.sharers for one in places] == [2, 2]


def test_one_worker_that_dies(tiny_path: Path) -> None:
    llm = open_llm(tiny_path, "one worker")
    engine = llm.llm_engine
    engine.add_request("a", "Once", GREEDY)
    engine.step()
    os.kill(members_of(llm)[0].pid, signal.SIGKILL)
    output = adapter_files.drive(engine)["a"].outputs[0]
    assert output.finish_reason == "error" and "the worker's actor has ended" in output.stop_reason
    assert "has ended" in engine.executor.health_error()
    engine.check_integrity()


@pytest.mark.parametrize("where", ["one node", "two nodes"])
def test_one_that_hangs_ends_all(tiny_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(tiny_path, where)
    members = members_of(llm)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)
    os.kill(members[1].pid, signal.SIGSTOP)
    output = llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "error" and "a process has not answered for 0.5 s" in output.stop_reason
    assert all(ended(member.pid, 30) for member in members)


def test_a_node_that_is_removed(cluster: Any, tiny_path: Path) -> None:
    node = cluster.add_node(num_cpus=3, object_store_memory=100 << 20)
    llm = open_llm(tiny_path, "one worker", ray_worker_cpus=3)
    engine = llm.llm_engine
    engine.add_request("a", "Once", GREEDY)
    engine.step()
    cluster.remove_node(node)
    output = adapter_files.drive(engine)["a"].outputs[0]
    assert output.finish_reason == "error" and "the worker's actor has ended" in output.stop_reason


def test_an_engine_that_is_forgotten(tiny_path: Path) -> None:
    llm = open_llm(tiny_path, "two nodes", skip_tokenizer_init=True)
    pids = [member.pid for member in members_of(llm)]
    del llm
    gc.collect()
    assert all(ended(pid) for pid in pids)


def test_what_is_refused(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's errors are those of this process; and what Ray cannot do."""
    with pytest.raises(QuireError, match="max_model_len=10000"):
        open_llm(tiny_path, "two nodes", max_model_len=10_000)
    with monkeypatch.context() as hurried:
        hurried.setattr(ray_executor, "_PLACE_SECONDS", 0.5)
        with pytest.raises(QuireError, match=r"2 workers of 3 CPUs each .* no room .* nodes have 2, 2 CPUs"):
            open_llm(tiny_path, "two nodes", ray_worker_cpus=3)
    with monkeypatch.context() as other:
        other.setattr(ray_executor, "versions", lambda: "quire 0")
        with pytest.raises(QuireError, match=r"has quire .*, and the engine quire 0: make them alike"):
            open_llm(tiny_path, "one worker")
    with monkeypatch.context() as other:
        other.setattr(ray_executor, "files_digest", lambda path: "another")
        with pytest.raises(QuireError, match="has other files than here: all nodes need the same"):
            open_llm(tiny_path, "one worker")


def test_a_server(tiny_path: Path) -> None:
    """Over HTTP, from workers on two nodes."""
    expected = LLM(str(tiny_path)).generate("Once upon", GREEDY, use_tqdm=False)[0].outputs[0].text
    flags = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--ray-worker-cpus", "2"]
    with ServerProcess("--model", str(tiny_path), *flags) as server:
        answer = server.client().completions.create(
            model=server.client().models.list().data[0].id,
            prompt="Once upon",
            temperature=0,
            max_tokens=6,
            extra_body={"ignore_eos": True},
        )
        assert answer.choices[0].text == expected
