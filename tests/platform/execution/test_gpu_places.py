"""Which GPU each of several processes has, and how they exchange: what can be known without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.kernels import group_exchange
from quire.kernels.exchange import Columns
from quire.platform.execution import device, sharded, worker_process
from quire.platform.execution.worker_process import Place, Start


@pytest.mark.parametrize(
    ("gpus", "sharers"),
    [
        (["cuda:1", "cuda:2"], [1, 1]),
        (["cuda:0", "cuda:0"], [2, 2]),
        (["cuda:1", "cuda:0", "cuda:1"], [2, 1, 2]),
    ],
)
def test_processes_on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: list[str], sharers: list[int]) -> None:
    """Each is told its own, and meets the others there: there is no memory for an exchange. All go one way."""
    places: list[Place] = []
    monkeypatch.setattr(device, "for_processes", lambda name, count: gpus)
    monkeypatch.setattr(sharded, "ProcessExecutor", lambda config, path, place, *rest: places.append(place))
    monkeypatch.setattr(sharded, "ShardedExecutor", lambda workers, stages, store: store)
    store = sharded.several_processes(EngineConfig(tensor_parallel_size=len(gpus)), Path("model"))
    assert [(place.gpu, place.sharers, place.memory) for place in places] == [
        (gpu, count, None) for gpu, count in zip(gpus, sharers, strict=True)
    ]
    meetings = [place.meeting for place in places]
    assert all(meeting is not None and meeting.port == store.port for meeting in meetings)
    assert [place.nccl for place in places] == [len(set(gpus)) == len(gpus)] * len(gpus)
    assert [place.rank for place in places] == list(range(len(gpus)))


@pytest.mark.parametrize("nccl", [True, False])
def test_which_exchange_processes_on_gpus_have(monkeypatch: pytest.MonkeyPatch, nccl: bool) -> None:
    groups = {True: object(), False: object()}
    monkeypatch.setattr(group_exchange, "join_gpus", lambda *where: groups[True])
    monkeypatch.setattr(group_exchange, "join_group", lambda *where: groups[False])
    place = Place(1, 3, (), gpu="cuda:5", nccl=nccl, sharers=1).meeting_at("127.0.0.1", 1, "127.0.0.1", 1.0)
    exchange = worker_process._shard(place).exchange
    assert exchange.group is groups[nccl] and (exchange.rank, exchange.size) == (1, 3)
    assert isinstance(exchange, group_exchange.CollectiveExchange if nccl else group_exchange.GroupExchange)
    config = EngineConfig()
    there = worker_process._config(Start(config, "model", 1, 0, place))
    assert there == replace(config, model=replace(config.model, device="cuda:5"))


def test_what_is_gathered_of_a_cpu_goes_by_the_gpu_and_back() -> None:
    """NCCL takes tensors of its GPU alone, and identities of files lie in main memory."""
    seen: list[str] = []
    group: Any = SimpleNamespace(_allgather_base=lambda whole, own: _seen(seen, whole, own))
    exchange = group_exchange.CollectiveExchange(group, 0, 2, torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # whose numbers nobody can copy back
        exchange.gather(torch.ones((3, 4), dtype=torch.uint8), Columns([[4, 2]]))
    assert seen == ["meta"] * 2


def _seen(seen: list[str], *tensors: torch.Tensor) -> Any:
    seen += [one.device.type for one in tensors]
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_is_told_once_the_gpu_has_done_it(late: bool) -> None:
    """It may fail when it is started, and when its tokens are waited for."""
    happened: list[str] = []

    def fail(*_: object) -> Any:
        happened.append("failed")
        raise MemoryError

    runner = SimpleNamespace(drafts=False, execute=(lambda plan: SimpleNamespace(result=fail)) if late else fail)
    worker = SimpleNamespace(runner=runner, settle=lambda: happened.append("settled"))
    with pytest.raises(MemoryError):
        worker_process._Served(worker, None).do_execute(False)
    assert happened == ["failed", "settled"]
