"""A worker in a process of its own: takes plans from a connection and answers with results.

One that `ProcessExecutor` has started ends with the process that did, whatever becomes of that one, and only that one
hears Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import Any, NamedTuple, NoReturn

from quire.garbage import collector_waits

_PARENT_SECONDS = 1.0  # between two looks at whether the parent is still there
# After an answer the next plan comes soon, and to be woken takes as long as taking it in: it is looked out for.
_WAKEFUL_SECONDS = 0.0015


@dataclass(frozen=True, slots=True)
class Channels:
    """File descriptors of the worker's ends. steps: plans and results; tensors: memory of pixels; errands: a connection
    for each thread that runs them (reading adapters, compiling grammars); life: closed when the parent ends."""

    steps: int
    tensors: int
    errands: tuple[int, ...]
    life: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, and how to be like the parent. log_level: of the logger "quire". place: among
    those that compute one model together; None: it is alone."""

    config: Any
    path: str
    threads: int
    log_level: int
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process among the `size` that compute a stage together: its number, and the processors that it may use
    (empty: all). memory: the path by which it opens the memory through which they exchange what they have computed;
    None: they send it to one another, and meet by `meeting`. stage: the number of the stage, of `stages`; pipe: where
    those of its own number in other stages meet. gpu: its GPU, as "cuda:1"; None: the device that the
    settings name. nccl: each process has a GPU of its own, so that a stage's exchange by NCCL. sharers: how many of all
    stages' processes share the memory of its blocks, the machine's or the GPU's, itself among them."""

    rank: int
    size: int
    processors: tuple[int, ...]
    memory: str | None = None
    meeting: Meeting | None = None
    stage: int = 0
    stages: int = 1
    pipe: Meeting | None = None
    gpu: str | None = None
    nccl: bool = False
    sharers: int = 1

    def meeting_at(self, host: str, port: int, address: str, seconds: float) -> Place:
        """The same, of processes that meet where they need to: those of a stage, unless they share memory, and those of
        one number in all stages. The arguments are `Meeting`'s."""
        within = Meeting(host, port, address, seconds, f"stage {self.stage}")
        across = Meeting(host, port, address, seconds, f"pipe {self.rank}")
        return replace(
            self,
            meeting=within if self.size > 1 and self.memory is None else None,
            pipe=across if self.stages > 1 else None,
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where processes that send to one another meet: their store's host and port, and what they are called there.
    address: of this process, by which the others reach it. seconds: that one waits for another."""

    host: str
    port: int
    address: str
    seconds: float
    name: str = ""


class Answer(NamedTuple):
    """number: of the message that it answers. error: pickled by itself. lost: a plan could not be taken in, and this is
    why there will be no other answers. logs: records since the last answer."""

    number: int
    value: Any = None
    error: bytes | None = None
    lost: str | None = None
    logs: tuple[logging.LogRecord, ...] = ()


def start(channels: str) -> None:
    """Serve until the pipe is closed. channels: as JSON."""
    given = json.loads(channels)
    _serve(Channels(given["steps"], given["tensors"], tuple(given["errands"]), given["life"]))


def _serve(channels: Channels) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(channels.life, os.getppid()), daemon=True).start()
    errands = [Connection(descriptor) for descriptor in channels.errands]
    serve(Connection(channels.steps), errands, socket(fileno=channels.tensors))


def serve(steps: Connection, errands: Sequence[Connection], tensors: socket | None) -> None:
    """Make a worker, and do what is asked for, until `steps` is closed. tensors: where memory of pixels comes; None:
    they come in messages."""
    logs = _Logs()
    with collector_waits():
        served = _load(steps, tensors, logs)
    if served is None:
        return
    for channel in errands:
        threading.Thread(target=served.run_errands, args=(channel,), daemon=True).start()
    served.run(steps, logs)


def _load(steps: Connection, tensors: socket | None, logs: _Logs) -> _Served | None:
    """Make the worker that the first message describes, and answer with its facts; None: that has failed."""
    import torch

    from quire.platform.execution.wire import pack, pack_error, unpack
    from quire.platform.execution.worker import Worker

    logging.getLogger("quire").addHandler(logs)
    logging.getLogger("quire").propagate = False
    try:
        start: Start = unpack(steps.recv_bytes())  # fails for a class that only the parent's program has
        if start.place is not None and start.place.processors:
            os.sched_setaffinity(0, start.place.processors)
        torch.set_num_threads(start.threads)
        if start.place is not None and start.place.gpu is not None:
            torch.cuda.set_device(start.place.gpu)
        logging.getLogger("quire").setLevel(start.log_level)
        worker = Worker(_config(start), Path(start.path), _share(start.place))
    except Exception as error:
        steps.send_bytes(pack(Answer(0, error=pack_error(error), logs=logs.take())))
        return None
    steps.send_bytes(pack(Answer(0, worker.facts, logs=logs.take())))
    return _Served(worker, tensors)


def _config(start: Start) -> Any:
    """The settings, with the process's own GPU."""
    if start.place is None or start.place.gpu is None:
        return start.config
    return replace(start.config, model=replace(start.config.model, device=start.place.gpu))


def _share(place: Place | None) -> Any:
    """This process's part of the model."""
    from quire.platform.execution.worker import Share

    return Share() if place is None else Share(_shard(place), _stage(place), place.sharers)


def _shard(place: Place) -> Any:
    """This process's part of every matrix. Only its own processors are used from here on."""
    if place.size == 1:
        return None
    from quire.kernels.exchange import SharedExchange
    from quire.kernels.group_exchange import CollectiveExchange, GroupExchange, join_gpus, join_group
    from quire.layers.shards import Shard

    if place.memory is not None:
        descriptor = os.open(place.memory, os.O_RDWR)
        try:
            return Shard(place.rank, place.size, SharedExchange(descriptor, place.rank, place.size))
        finally:
            os.close(descriptor)
    assert place.meeting is not None
    at = place.meeting
    if place.nccl:
        import torch

        group = join_gpus(at.host, at.port, place.rank, place.size, at.seconds, at.name)
        gpu = torch.device(str(place.gpu))
        return Shard(place.rank, place.size, CollectiveExchange(group, place.rank, place.size, gpu))
    group = join_group(at.host, at.port, at.address, place.rank, place.size, at.seconds, at.name)
    return Shard(place.rank, place.size, GroupExchange(group, place.rank, place.size))


def _stage(place: Place) -> Any:
    """This process's part of the layers."""
    if place.pipe is None:
        return None
    from quire.kernels.group_exchange import join_group
    from quire.kernels.pipe import Pipe
    from quire.layers.stages import Stage

    at = place.pipe
    group = join_group(at.host, at.port, at.address, place.stage, place.stages, at.seconds, at.name)
    return Stage(place.stage, place.stages, Pipe(group, place.stage, place.stages))


class _Served:
    """Carries out the messages of the step loop; and in threads of their own, the errands: reading adapters."""

    def __init__(self, worker: Any, tensors: socket | None) -> None:
        self._worker = worker
        # A plan may come while the step before it runs. A draft model would read what is not filled in yet.
        self._worker.runner.looks_ahead = not self._worker.runner.drafts
        self._last_failed = False  # whether the last step did
        self._tensors = tensors
        self._plan: Any = None  # that was prepared last
        self._failure: Exception | None = None  # of what no answer was wanted to, since then
        self._lost: str | None = None
        self._adapters: dict[int, Any] = {}  # by handle
        self._handles: dict[int, int] = {}  # of the adapters that plans install, by uid
        self._next_handle = count(1)
        self._grammars: dict[bytes, Any] = {}  # by their vocabulary's digest
        self._worker.weights = lambda uid: self._adapters[self._handles[uid]]

    def run(self, steps: Connection, logs: _Logs) -> None:
        """Messages come in order, several at once; the last of them may want an answer."""
        from quire.platform.execution.wire import pack, pack_error, unpack

        readable = select.poll()
        readable.register(steps, select.POLLIN)
        while True:
            _look_out(readable)
            try:
                number, messages = unpack(steps.recv_bytes())
            except (EOFError, OSError):
                return
            value, error = None, None
            for message in messages:
                try:
                    kind, *given = unpack(message)
                    value = getattr(self, f"do_{kind}")(*given)
                except Exception as reason:
                    error = reason
            if number is None:
                self._failure = error or self._failure
            else:
                packed = None if error is None else pack_error(error)
                answer = Answer(number, value, packed, self._lost, logs.take())
                steps.send_bytes(pack(answer))

    def do_prepare(self, rows: Any, rest: Any, handles: dict[int, int]) -> None:
        from quire.platform.execution.executor import lost_plan
        from quire.platform.execution.wire import unpack_plan

        plan = unpack_plan(rows, rest)
        self._plan, self._failure = plan, None
        self._handles.update(handles)
        try:
            self._worker.runner.prepare(plan)
        except Exception as error:  # told with the next answer
            logging.getLogger("quire").exception("a plan could not be taken in")
            self._lost = self._lost or lost_plan(error)
        for uid in plan.drop:
            if uid not in plan.install:
                self._handles.pop(uid, None)

    def do_pixels(self, digest: bytes, layout: Any, given: int | bytes) -> None:
        """given: the bytes themselves, or how many come beside the messages."""
        from quire.platform.execution.wire import receive_tensors, tensors_in

        if isinstance(given, bytes):
            inputs = tensors_in(bytearray(given), layout)
        else:
            assert self._tensors is not None
            inputs = receive_tensors(self._tensors, layout, given)
        self._worker.runner.take_pixels(digest, inputs)

    def do_execute(self, behind: bool) -> Any:
        """behind: this was asked before anybody had heard of the last step. It is not begun where that has failed:
        it may go on from that, and another process may still be amid it."""
        from quire.platform.execution.wire import pack_result

        if behind and self._last_failed and self._failure is None:
            self._failure = RuntimeError("the step before has failed, which this one goes on from")
        self._last_failed = True
        if self._failure is not None:
            self._worker.runner.skip(self._plan)
            raise self._failure
        try:
            packed = pack_result(self._worker.runner.execute(self._plan).result())
        except Exception:
            self._worker.settle()
            raise
        self._last_failed = False
        return packed

    def do_memory(self, name: str) -> None:
        getattr(self._worker.memory, name)()

    def do_transfers(self, seconds: float) -> Any:
        from quire.platform.kv.connector import TransferReport

        transfers = self._worker.runner.transfers
        return TransferReport() if transfers is None else transfers.report(seconds)

    def do_forget(self, handle: int) -> None:
        self._adapters.pop(handle, None)

    def run_errands(self, channel: Connection) -> None:
        """What is done beside the steps, one after the other."""
        from quire.platform.execution.wire import pack, pack_error, unpack

        self._worker.use_device()
        while True:
            try:
                kind, given = unpack(channel.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                channel.send_bytes(pack((getattr(self, f"errand_{kind}")(*given), None)))
            except Exception as error:
                channel.send_bytes(pack((None, pack_error(error))))

    def errand_read(self, directory: str) -> tuple[Any, ...]:
        """Read an adapter; what is told of it is its handle and what `RemoteAdapter` has."""
        adapter = self._worker.reader.read(Path(directory))
        handle = next(self._next_handle)
        self._adapters[handle] = adapter
        return (
            handle, adapter.digest, adapter.nbytes, adapter.modules, adapter.visual, adapter.ranks, adapter.mixable,
            adapter.bound,
        )  # fmt: skip

    def errand_vocabulary(self, source: Any) -> None:
        """Make what grammars are compiled over."""
        from quire.platform.sampling.structured.grammar_cache import Grammars

        self._grammars[source.digest] = Grammars(source)

    def errand_grammar(self, digest: bytes, constraint: Any) -> None:
        """Compile a grammar, for plans to come."""
        self._grammars[digest].prepare(constraint)


class _Logs(logging.Handler):
    """Keeps records until the next answer takes them along."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = text, None, None
        self._records.append(record)

    def take(self) -> tuple[logging.LogRecord, ...]:
        with self.lock or threading.Lock():
            records, self._records = tuple(self._records), []
        return records


def _look_out(readable: select.poll) -> None:
    """Stay awake for a while, or until there is something to read."""
    end = time.perf_counter() + _WAKEFUL_SECONDS
    while not readable.poll(0) and time.perf_counter() < end:
        pass


def _end_with_parent(life: int, parent: int) -> NoReturn:
    """Nothing is ever written to `life`: it is readable once its other end is closed."""
    while not select.select([life], [], [], _PARENT_SECONDS)[0]:
        if os.getppid() != parent:
            break
    os._exit(0)
