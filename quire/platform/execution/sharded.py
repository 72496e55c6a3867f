"""The executor of several processes that compute one model together: each some rows of every matrix
(`layers/shards.py`), some of the layers (`layers/stages.py`), or both.

Every process is told everything: each plans nothing, and knows each sequence. Those of the last stage draw every token,
the same, and what the engine hears is the first one's of them. They end together: a model of which a part is missing
computes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quire.config import EngineConfig
from quire.errors import AdapterError, WorkerDiedError
from quire.kernels.exchange import ExchangeError, can_share_memory, shared_memory
from quire.kernels.group_exchange import meeting_store
from quire.kernels.pipe import StageError
from quire.models.base import CausalLM
from quire.platform.execution import device, remote
from quire.platform.execution.numa import processors_for
from quire.platform.execution.process import ProcessExecutor
from quire.platform.execution.remote import RemoteAdapter, RemoteExecutor
from quire.platform.execution.remote_step import RemoteStep
from quire.platform.execution.wire import unpack
from quire.platform.execution.worker_process import Answer, Place
from quire.platform.kv.connector import MergedReports, TransferReport
from quire.platform.scheduling.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.platform.sampling.structured.constraint import CompiledConstraint
    from quire.platform.sampling.structured.vocabulary import VocabularySource

_Told = TypeVar("_Told")

_LOOK_SECONDS = 0.05
# Processes make the same steps: when one has failed and another has said nothing for so long, that one waits for it.
_BEHIND_SECONDS = 5.0
_LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, eq=False)
class ShardedAdapter(RemoteAdapter):
    """An adapter that each process has read by itself. parts: theirs. What is said of it is the first's, but for what
    stages have by themselves, which is all stages' first."""

    parts: tuple[RemoteAdapter, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[RemoteAdapter], stages: int) -> ShardedAdapter:
        """parts: by stage, and of each as many. Raises AdapterError for parts that are not of the same files."""
        firsts = parts[:: len(parts) // stages]
        own = {"handle": 0, "nbytes": sum(one.nbytes for one in firsts), "mixable": all(one.mixable for one in firsts)}
        said = [{**_fields(part), **own} for part in parts]
        if any(one != said[0] for one in said):
            raise AdapterError("its files have changed while they were read: load it again.")
        return cls(**said[0], parts=tuple(parts))


def _fields(part: RemoteAdapter) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(RemoteAdapter)}


class ShardedStep:
    """A step that every process runs."""

    ready = False

    def __init__(self, plan: StepPlan, result: Callable[[], StepResult], known_there: bool) -> None:
        self.plan = plan
        self.result = result
        self.known_there = known_there


def several_processes(config: EngineConfig, path: Path) -> ShardedExecutor:
    """Start `pipeline_parallel_size` times `tensor_parallel_size` processes of this machine. Raises what
    `ShardedExecutor` raises."""
    stages, size = config.pipeline_parallel_size, config.tensor_parallel_size
    gpus = device.for_processes(config.model.device, stages * size)
    nccl = bool(gpus) and len(set(gpus)) == len(gpus)
    workers: list[RemoteExecutor] = []
    shares = size > 1 and not gpus and can_share_memory()
    memories = [shared_memory(size) for _ in range(stages)] if shares else []
    store = meeting_store(_LOCALHOST) if stages > 1 or not shares else None
    try:
        threads = max(1, torch.get_num_threads() // (stages * size))
        for number, processors in enumerate(processors_for(stages * size)):
            stage, rank = divmod(number, size)
            place = Place(rank, size, processors, stage=stage, stages=stages, sharers=stages * size)
            own = (memories[stage],) if shares else ()
            place = replace(place, memory=f"/proc/self/fd/{own[0]}" if own else None)
            if gpus:
                place = replace(place, gpu=gpus[number], nccl=nccl, sharers=gpus.count(gpus[number]))
            if store is not None:
                place = place.meeting_at(_LOCALHOST, store.port, _LOCALHOST, remote.ANSWER_SECONDS)
            workers.append(ProcessExecutor(config, path, place, threads, own))
        return ShardedExecutor(workers, stages, store)
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    finally:
        for memory in memories:
            os.close(memory)


class ShardedExecutor:
    """Tells several processes what is to be done. What its methods mean, `Executor` says.

    Raises what `RemoteExecutor` raises.
    """

    def __init__(self, workers: Sequence[RemoteExecutor], stages: int = 1, store: Any = None) -> None:
        """workers: by stage, and of each as many, whose facts are still to come. They are closed with this executor.
        store: where they have met, which is kept as long as they are."""
        self._store = store
        self._broken: str | None = None
        self.steps_at_once = stages
        self._workers = list(workers)
        self._last: list[RemoteStep] = []  # each process's part of the last step
        self._reports = MergedReports(len(workers))
        self._most_adapter_bytes = min(workers[0].config.lora.host_bytes, workers[0].config.lora.device_bytes)
        self._wait_for_all([0] * len(workers), seconds=float("inf"))  # weights may have to be read
        for worker in self._workers:
            worker.take_facts()
            worker.before_large = self._wait_for_last
        facts = [worker.facts for worker in self._workers]
        self.facts = replace(facts[0], pool_bytes=sum(one.pool_bytes for one in facts))

    def prepare(self, plan: StepPlan) -> None:
        self._tell_all(lambda worker: worker.prepare(plan))

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        self._check()
        first = self._workers[: len(self._workers) // self.steps_at_once]  # the stage that encodes
        self._tell_all(lambda worker: worker.take_pixels(digest, inputs), first)

    def execute(self, plan: StepPlan) -> ShardedStep:
        self._check()
        steps = self._tell_all(lambda worker: worker.execute(plan))
        self._last = steps
        return ShardedStep(plan, lambda: self._result(steps), steps[0].known_there)

    def _tell_all(
        self, tell: Callable[[RemoteExecutor], _Told], workers: Sequence[RemoteExecutor] | None = None
    ) -> list[_Told]:
        """Where one hears of it and another does not, they are not in step any more, and all end."""
        told: list[_Told] = []
        try:
            for worker in self._workers if workers is None else workers:
                told.append(tell(worker))
        except BaseException as error:
            if told or not isinstance(error, Exception):
                self._end(f"a message has reached some of the processes alone ({type(error).__name__}: {error})")
            raise
        return told

    def structure(self) -> CausalLM:
        return self._workers[0].structure()

    # -- adapters -------------------------------------------------------------------------------------------------

    def adapter_reader(self) -> ShardedExecutor:
        return self

    def connect_adapters(self, weights: Callable[[int], ShardedAdapter]) -> None:
        def part(number: int) -> Callable[[int], RemoteAdapter]:
            return lambda uid: weights(uid).parts[number]

        for number, worker in enumerate(self._workers):
            worker.connect_adapters(part(number))

    def read(self, directory: Path) -> ShardedAdapter:
        """Have every process read an adapter. Any thread may call this. Raises AdapterError."""
        adapter = ShardedAdapter.of([worker.read(directory) for worker in self._workers], self.steps_at_once)
        if adapter.nbytes > self._most_adapter_bytes:  # its parts are less
            raise AdapterError(
                f"{directory}: takes {adapter.nbytes:,} bytes, and at most {self._most_adapter_bytes:,} are given to "
                "adapters at once."
            )
        return adapter

    # -- grammars -------------------------------------------------------------------------------------------------

    def remote_grammars(self) -> ShardedExecutor:
        return self

    def take_vocabulary(self, source: VocabularySource) -> None:
        """As `RemoteGrammars` has it."""
        for worker in self._workers:
            worker.remote_grammars().take_vocabulary(source)

    def compile(self, digest: bytes, constraint: CompiledConstraint) -> None:
        """As `RemoteGrammars` has it."""
        for worker in self._workers:
            worker.remote_grammars().compile(digest, constraint)

    # -- memory ---------------------------------------------------------------------------------------------------

    def take_transfers(self, seconds: float = 0.0) -> TransferReport:
        self._check()
        self._wait_for_last()
        numbers = self._tell_all(lambda worker: worker.ask_transfers(seconds))
        self._wait_for_all(numbers)
        return self._reports.merge([worker.answer(one) for worker, one in zip(self._workers, numbers, strict=True)])

    def _wait_for_last(self) -> None:
        """Until the step that runs is done: one process may have failed in it alone, and the others wait for that one.
        Raises WorkerDiedError then."""
        if not self._last or any(step.is_answered for step in self._last):
            return
        try:
            self._wait_for_all([step.number for step in self._last])
        except WorkerDiedError:
            raise
        except Exception as error:
            raise WorkerDiedError(str(self._broken)) from error

    def check_memory(self) -> None:
        self._all("check")

    def give_memory_back(self) -> None:
        self._all("give_back")

    def take_blocks(self) -> None:
        self._all("take_blocks")

    def read_weights(self) -> None:
        self._all("read_weights")

    def _all(self, what: str) -> None:
        """Each by itself: none waits for another. Raises what went wrong in the first that something went wrong in."""
        self._check()
        numbers = self._tell_all(lambda worker: worker.ask_memory(what))
        self._wait_for_all(numbers, behind=float("inf"))
        errors = []
        for worker, number in zip(self._workers, numbers, strict=True):
            try:
                worker.answer(number)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # -- life -----------------------------------------------------------------------------------------------------

    def health_error(self) -> str | None:
        if self._broken is None:
            for rank, worker in enumerate(self._workers):
                error = worker.health_error()
                if error is not None:
                    self._end(f"process {rank} of {len(self._workers)}: {error}")
                    break
        return self._broken

    def close(self) -> None:
        self._end("the engine was closed")

    def _end(self, why: str) -> None:
        """None of them is of use without the others."""
        self._broken = self._broken or why
        for worker in self._workers:
            worker.close()

    def _check(self) -> None:
        if self.health_error() is not None:
            raise WorkerDiedError(str(self._broken))

    def _result(self, steps: Sequence[RemoteStep]) -> StepResult:
        """Of the last stage. Raises what went wrong in the first process that something went wrong in."""
        if not any(step.is_answered for step in steps):  # else an interrupt has come behind that
            self._wait_for_all([step.number for step in steps])
        results: list[StepResult | None] = []
        errors: list[Exception | None] = []
        for step in steps:
            try:
                results.append(step.result())
                errors.append(None)
            except WorkerDiedError as error:
                self._end(str(error))
                raise
            except Exception as error:
                results.append(None)
                errors.append(error)
        gone = [error for error in errors if isinstance(error, ExchangeError)]
        if gone:
            self._end(str(gone[0]))
            raise WorkerDiedError(str(self._broken)) from gone[0]
        size = len(steps) // self.steps_at_once
        for first in range(0, len(steps), size):
            own = [error for error in errors[first : first + size] if error is not None]
            if own and len(own) < size:
                self._end(f"a step failed in one process alone ({own[0]!r}), and they are not in step any more")
                raise WorkerDiedError(str(self._broken)) from own[0]
            if own:
                raise own[0]
        last = results[-size]
        assert last is not None
        return last

    def _wait_for_all(self, numbers: Sequence[int], seconds: float | None = None, behind: float | None = None) -> None:
        """Wait until all have answered, so many seconds at most, and `behind` once one has failed. An interrupt loses
        nothing. Raises WorkerDiedError where one never will, or what has failed before."""
        waiting = dict(zip(self._workers, numbers, strict=True))
        seconds = remote.ANSWER_SECONDS if seconds is None else seconds
        behind = _BEHIND_SECONDS if behind is None else behind
        deadlines = dict.fromkeys(self._workers, time.monotonic() + seconds)
        failed: RemoteExecutor | None = None
        while waiting:
            if time.monotonic() > min(deadlines[worker] for worker in waiting):
                self._end_late(f"has not answered for {seconds:g} s", failed, numbers)
            for worker, number in list(waiting.items()):
                try:
                    answer = worker.look_for(number, _LOOK_SECONDS)
                except WorkerDiedError as error:
                    if failed is not None and not _lost_another(failed.look_for(self._number_of(failed, numbers), 0)):
                        failed.answer(self._number_of(failed, numbers))
                    # Not by asking all: it may have ended others, which come before it.
                    self._end(f"process {self._workers.index(worker)} of {len(self._workers)}: {error}")
                    raise WorkerDiedError(str(self._broken)) from None
                if answer is None:
                    continue
                del waiting[worker]
                if failed is None and (answer.error is not None or answer.lost is not None):
                    failed = worker
                    for one in self._stage_of(worker):  # another stage may have a step before this one to make
                        deadlines[one] = min(deadlines[one], time.monotonic() + behind)

    def _end_late(self, why: str, failed: RemoteExecutor | None, numbers: Sequence[int]) -> None:
        """failed: the first that something went wrong in; None: why says what is wrong. Raises that."""
        self._end(f"a process {why if failed is None else 'has failed, and the others wait for it'}; all were ended")
        if failed is not None:
            failed.answer(self._number_of(failed, numbers))
        raise WorkerDiedError(str(self._broken))

    def _stage_of(self, worker: RemoteExecutor) -> Sequence[RemoteExecutor]:
        size = len(self._workers) // self.steps_at_once
        first = self._workers.index(worker) // size * size
        return self._workers[first : first + size]

    def _number_of(self, worker: RemoteExecutor, numbers: Sequence[int]) -> int:
        return numbers[self._workers.index(worker)]


def _lost_another(answer: Answer | None) -> bool:
    """Whether a process has failed only because another one is gone, or has failed."""
    return (
        answer is not None
        and answer.error is not None
        and isinstance(unpack(answer.error), (ExchangeError, StageError))
    )
