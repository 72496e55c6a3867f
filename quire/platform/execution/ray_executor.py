"""Workers as actors of Ray, on one machine or several: `distributed_executor_backend="ray"`.

One actor a process, in a placement group: all on one node where that has room, else over nodes. Those of a stage that
are on one node exchange what they have computed through its memory, others by messages. The engine knows them as it
knows workers in processes of its own: `RemoteExecutor`, `ShardedExecutor`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import QuireError, WorkerDiedError
from quire.kernels.group_exchange import meeting_store
from quire.platform.execution import remote
from quire.platform.execution.link import errands_at_once
from quire.platform.execution.ray_worker import Introduction, RayWorker, accept, files_digest, versions
from quire.platform.execution.remote import RemoteExecutor
from quire.platform.execution.sharded import ShardedExecutor
from quire.platform.execution.wire import pack_tensors
from quire.platform.execution.worker_process import Place

logger = logging.getLogger("quire")

_ONE_NODE_SECONDS = 10.0  # for room on one node, where one is large enough
_PLACE_SECONDS = 60.0  # for room at all
_START_SECONDS = 120.0  # for an actor, which imports torch
_QUIET = {"log_to_driver": False, "logging_level": logging.WARNING}
_STORE_BYTES = 100 << 20  # of Ray's store of objects, which quire puts nothing in
_MOST_WORDS = 400  # characters of what Ray says of an actor's end


def ray_executor(config: EngineConfig, path: Path) -> RemoteExecutor | ShardedExecutor:
    """Start `pipeline_parallel_size` times `tensor_parallel_size` actors. Raises QuireError where there is no Ray or no
    room, and what `RemoteExecutor` raises."""
    config = _on_cpus(config)
    stages, size = config.pipeline_parallel_size, config.tensor_parallel_size
    ray = _connected()
    threads = config.ray_worker_cpus or max(1, torch.get_num_threads() // (stages * size))
    crew = Crew(ray, stages * size, threads)
    workers: list[RemoteExecutor] = []
    try:
        introductions = crew.introduce(path)
        memories = [crew.share_memory(size * stage, size) for stage in range(stages)] if size > 1 else [None] * stages
        store = meeting_store(ray.util.get_node_ip_address())
        links = crew.link(errands_at_once(config))
        if stages * size == 1:
            return RemoteExecutor(config, path, links[0], threads=threads)
        for number, (link, own) in enumerate(zip(links, introductions, strict=True)):
            stage, rank = divmod(number, size)
            neighbours = sum(one.machine == own.machine for one in introductions)
            place = Place(rank, size, (), memories[stage], stage=stage, stages=stages, sharers=neighbours)
            place = place.meeting_at(store.host, store.port, own.address, remote.ANSWER_SECONDS)
            workers.append(RemoteExecutor(config, path, link, place, threads))
        return ShardedExecutor(workers, stages, store)
    except BaseException:
        for worker in workers:
            worker.close()
        crew.end()
        raise


def _on_cpus(config: EngineConfig) -> EngineConfig:
    """The settings, with the CPU where nothing else is asked for. Raises QuireError where it is."""
    named = config.model.device
    if named == "auto":
        named = os.environ.get("QUIRE_DEVICE") or "cpu"
    if named not in ("auto", "cpu"):
        raise QuireError(
            f"distributed_executor_backend='ray': Ray's workers compute on CPUs alone, and the model's device is "
            f"{named!r}; take device='cpu', or leave the back end out: processes of one machine take its GPUs."
        )
    return replace(config, model=replace(config.model, device="cpu"))


def _connected() -> Any:
    """The module, connected to a cluster: the one that RAY_ADDRESS names, one of this machine, or a new one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray tells its makers how it is used, unless this is there
    try:
        import ray
    except ImportError as error:
        raise QuireError(
            f"distributed_executor_backend='ray': Ray cannot be imported ({error}): pip install quire-llm[ray]"
        ) from error
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        try:
            ray.init(address or "auto", **_QUIET)
        except ConnectionError as error:
            if address:
                raise QuireError(f"RAY_ADDRESS={address}: no cluster of Ray's answers there: {error}") from error
            ray.init("local", include_dashboard=False, object_store_memory=_STORE_BYTES, **_QUIET)
    if ray.util.client.ray.is_connected():
        raise QuireError(
            "distributed_executor_backend='ray': this program is only a client of a cluster (ray://), and workers "
            "could not reach it: start it on a node of the cluster."
        )
    return ray


class Crew:
    """Actors in a placement group, one for each process. They end together. Raises QuireError where there is no
    room."""

    def __init__(self, ray: Any, size: int, cpus: int) -> None:
        self._ray, self._size = ray, size
        group = _room(ray, size, cpus)
        self.actors: list[Any] = []
        self.members: list[Introduction] = []
        self.end: Callable[[], object] = weakref.finalize(self, _end, ray, self.actors, group, os.getpid())
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(num_cpus=cpus, max_restarts=0)(RayWorker)
        environment = {name: value for name, value in os.environ.items() if name.startswith("QUIRE_")}
        for number in range(size):
            place = strategy(group, placement_group_bundle_index=number)
            self.actors.append(actor.options(scheduling_strategy=place).remote(environment))

    def introduce(self, path: Path) -> list[Introduction]:
        """Where they are. Raises QuireError where one has another version or other files of the model."""
        asked = [actor.introduce.remote(str(path)) for actor in self.actors]
        members = self._get(asked)
        nodes = [one.node for one in members]  # neighbours are of one node, and so of one stage, as far as that goes
        order = sorted(range(self._size), key=lambda number: nodes.index(nodes[number]))
        self.members, self.actors[:] = [members[one] for one in order], [self.actors[one] for one in order]
        own, own_files = versions(), files_digest(path)
        for rank, one in enumerate(self.members):
            logger.info("Ray's worker %d of %d: process %d on %s", rank, self._size, one.pid, one.address)
            if one.versions != own:
                raise QuireError(f"Ray's node {one.address} has {one.versions}, and the engine {own}: make them alike.")
            if one.files != own_files:
                what = "other files than here" if one.files else "no files"
                raise QuireError(f"{path}: Ray's node {one.address} has {what}: all nodes need the same, at one path.")
        return self.members

    def share_memory(self, first: int, size: int) -> str | None:
        """The path of memory that these actors open; None where they are on several nodes."""
        if len({one.node for one in self.members[first : first + size]}) > 1:
            return None
        (path,) = self._get([self.actors[first].share_memory.remote(size)])
        return str(path)

    def _get(self, asked: Sequence[Any]) -> list[Any]:
        try:
            return list(self._ray.get(asked, timeout=_START_SECONDS))
        except self._ray.exceptions.GetTimeoutError as error:
            raise QuireError(f"Ray has not started {self._size} workers within {_START_SECONDS:g} s.") from error
        except self._ray.exceptions.RayError as error:
            raise QuireError(f"Ray has started no worker: {_words(error)}") from error

    def link(self, errands: int) -> list[RayLink]:
        """Have all of them connect. errands: connections for these, of each."""
        host, key = self._ray.util.get_node_ip_address(), secrets.token_bytes(32)
        came: dict[str, Connection] = {}
        with socket.create_server((host, 0), backlog=self._size * (1 + errands)) as listener:
            listener.settimeout(0.5)
            port = listener.getsockname()[1]
            ends = [
                Ending(actor.serve.remote(rank, host, port, key, errands)) for rank, actor in enumerate(self.actors)
            ]
            deadline = time.monotonic() + _START_SECONDS
            while len(came) < self._size * (1 + errands):
                one = accept(listener, key)
                if one is not None:
                    came[one[0]] = one[1]
                for end in ends:
                    if end.why is not None:
                        raise WorkerDiedError(end.why)
                if time.monotonic() > deadline:
                    raise QuireError(f"Ray's workers have not reached {host}:{port} within {_START_SECONDS:g} s.")
        return [
            RayLink(self, came[f"{rank} 0"], [came[f"{rank} {number}"] for number in range(1, 1 + errands)], end)
            for rank, end in enumerate(ends)
        ]


class Ending:
    """Of an actor, as Ray tells it. why: None while it runs."""

    def __init__(self, served: Any) -> None:
        """served: what its `serve` returns one day."""
        self.why: str | None = None
        self._known = threading.Event()
        served.future().add_done_callback(self._tell)

    def _tell(self, served: Any) -> None:
        error = served.exception()
        said = "it has lost its engine" if error is None else _words(error)
        self.why = f"the worker's actor has ended ({said})"
        self._known.set()

    def wait(self, seconds: float) -> None:
        self._known.wait(seconds)


class RayLink:
    """To one of the actors. As `Link` has it."""

    def __init__(self, crew: Crew, steps: Connection, errands: Sequence[Connection], ending: Ending) -> None:
        self.crew, self.steps, self.errands = crew, steps, errands
        self._ending = ending

    def pixels(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        return pack_tensors(inputs)

    def ending(self, seconds: float = 0) -> str | None:
        if seconds:
            self._ending.wait(seconds)
        if self._ending.why is not None:
            self.crew.end()  # their room is others' now, though the engine that has lost them goes on
        return self._ending.why

    def end(self) -> None:
        """All of them: none is of use without the others."""
        self.crew.end()
        for channel in (self.steps, *self.errands):
            channel.close()


def _room(ray: Any, size: int, cpus: int) -> Any:
    """A placement group: on one node, or else spread over several."""
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [{"CPU": cpus}] * size
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    attempts = [("SPREAD", _PLACE_SECONDS)]
    if max(nodes, default=0) >= size * cpus:
        attempts.insert(0, ("STRICT_PACK", _ONE_NODE_SECONDS))
    for strategy, seconds in attempts:
        group = placement_group(bundles, strategy=strategy)
        try:
            if group.wait(seconds):
                return group
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
    raise QuireError(
        f"distributed_executor_backend='ray': {size} workers of {cpus} CPUs each (ray_worker_cpus) have found no room "
        f"within {_PLACE_SECONDS:g} s; Ray's nodes have {', '.join(f'{count:g}' for count in nodes) or 'no'} CPUs, and "
        "others may use them."
    )


def _end(ray: Any, actors: Sequence[Any], group: Any, parent: int) -> None:
    """parent: whose they are; a process that was forked from that one only has a copy."""
    if os.getpid() != parent or not ray.is_initialized():
        return
    for actor in actors:
        with suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(actor)
    with suppress(Exception):
        ray.util.remove_placement_group(group)


def _words(error: BaseException) -> str:
    """What Ray says, in one line."""
    words = " ".join(str(error).split())
    return words if len(words) <= _MOST_WORDS else words[:_MOST_WORDS] + " ..."
