"""Steps that are computed at the same time, each by one thread alone: `SideBySide`.

Steps of sequences that generate nothing need not wait for one another. Two threads that compute one each never wait at
all, where a team of two waits for both at the end of every kernel: what little that is on a quiet machine is
milliseconds each time where other processes want the cores. No bit depends on how many threads compute a step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from quire import kernels
from quire.platform.execution.daemon_threads import DaemonThreads
from quire.platform.execution.model_runner import ModelRunner
from quire.platform.execution.running_step import HandedOn, RunningStep
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.scheduling.plan import StepPlan, StepResult

# Threads at most: they take turns in Python, between the kernels.
_MOST_THREADS = 4


class SideBySide:
    """Computes steps of a model that pools. All methods are the step loop's.

    threads: that the kernels of one step would have. compute_alone: has the thread that calls it compute without them.
    """

    def __init__(self, runner: ModelRunner, threads: int, compute_alone: Callable[[], None]) -> None:
        self.count = min(threads, _MOST_THREADS)
        self._runner, self._compute_alone = runner, compute_alone
        self._threads = DaemonThreads(self.count, "quire-step")
        weakref.finalize(self, self._threads.end, 0.0)
        self._running: list[_Step] = []

    def prepare(self, plan: StepPlan) -> None:
        """Before the runner does: what moves blocks or adapters waits for those that compute."""
        if plan.moves or plan.transfers is not None:
            self.wait()

    def execute(self, plan: StepPlan) -> RunningStep | HandedOn | _Step:
        """Start a step; by all threads where it needs what others compute, or has nothing beside it."""
        self._running = [step for step in self._running if not step.ready]
        sequences = self._runner.sequences(plan)
        if self._needs_others(plan, sequences):
            self.wait()
            return self._runner.compute(plan, sequences)
        if not self._running and not plan.others_wait:
            return self._runner.compute(plan, sequences)
        step = _Step(self._runner, plan, sequences, self._compute_alone)
        self._threads.submit(step.compute)
        self._running.append(step)
        return step

    def wait(self) -> None:
        """Until nothing runs."""
        for step in self._running:
            step.wait()
        self._running.clear()

    def close(self) -> None:
        """End the threads, once nothing runs."""
        self.wait()
        self._threads.end()

    def _needs_others(self, plan: StepPlan, sequences: Sequence[WorkerSequence]) -> bool:
        """Whether it reads what steps before it write, or something that one step has at a time: adapters, images."""
        if plan.encode or any(chunk.start for chunk in plan.chunks):
            return True
        if any(one.adapters or one.media for one in sequences):
            return True
        # Blocks of a request that was aborted are another's while the step still writes to them.
        return any(not step.blocks.isdisjoint(one.block_ids) for step in self._running for one in sequences)


class _Step:
    """A step that a thread computes alone. blocks: that it writes to."""

    known_there = False

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        sequences: Sequence[WorkerSequence],
        compute_alone: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.blocks = {block for one in sequences for block in one.block_ids}
        self._runner, self._sequences, self._compute_alone = runner, sequences, compute_alone
        self._ended = threading.Event()
        self._result: StepResult | Exception | None = None

    @property
    def ready(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def compute(self) -> None:
        """In the thread."""
        try:
            self._compute_alone()
            self._result = self._runner.compute(self.plan, self._sequences).result()
        except Exception as error:
            self._result = error
        finally:
            self._ended.set()

    def result(self) -> StepResult:
        """Wait for it."""
        self._ended.wait()
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


def side_by_side(runner: ModelRunner) -> SideBySide | None:
    """None: one step is computed at a time."""
    threads = torch.get_num_threads()
    if runner.device.type != "cpu" or not runner.pools or threads == 1:
        return None
    alone: Callable[[], None] | None = getattr(kernels.backend(), "compute_alone", None)
    return None if alone is None else SideBySide(runner, threads, alone)
