"""Steps that are computed at the same time, each by one thread alone: `SideBySide`.

Steps of sequences that generate nothing need not wait for one another. Two threads that compute one each never wait at
all, where a team of two waits for both at the end of every kernel: what little that is on a quiet machine is
milliseconds each time where other processes want the cores. No bit depends on how many threads compute a step.
"""

from __future__ import annotations

import atexit
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

# With more, a step has a team: threads take turns in Python, between the kernels.
_MOST_THREADS = 4


class SideBySide:
    """Computes steps of a model that pools. All methods are the step loop's.

    count: steps at once. most_tokens: of a step that one thread computes. compute_alone: has the thread that calls it
    compute without others.
    """

    def __init__(self, runner: ModelRunner, count: int, most_tokens: int, compute_alone: Callable[[], None]) -> None:
        self.count = count
        self._runner, self._most_tokens, self._compute_alone = runner, most_tokens, compute_alone
        self._threads = DaemonThreads(count, "quire-step")
        self._running: list[_Step] = []
        self._interrupt: KeyboardInterrupt | None = None
        _all.add(self)
        weakref.finalize(self, self._threads.end, 0.0).atexit = False

    def prepare(self, plan: StepPlan) -> None:
        """Before the runner takes it in: a plan that touches what steps read or write waits for them. That is what it
        moves, and sequences that go on. An interrupt is kept for `raise_interrupt`: the plan has to reach the
        runner."""
        if not (plan.moves or plan.poison or plan.transfers is not None or any(chunk.start for chunk in plan.chunks)):
            return
        while self._running:
            try:
                self.wait()
            except KeyboardInterrupt as error:
                self._interrupt = error

    def raise_interrupt(self) -> None:
        """Once it has."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def execute(self, plan: StepPlan) -> RunningStep | HandedOn | _Step:
        """Start a step; by all threads where it needs what others compute, or has too little beside it."""
        self._running = [step for step in self._running if not step.ready]
        sequences = self._runner.sequences(plan)
        if self._needs_all(plan, sequences):
            self.wait()
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

    def end(self) -> None:
        """As `close`, where nobody wants to know what they compute."""
        self._threads.give_up()
        self._threads.end()

    def _needs_all(self, plan: StepPlan, sequences: Sequence[WorkerSequence]) -> bool:
        """Whether it is computed by all threads, when no step runs: as it has what one step has at a time (adapters,
        images), or has a part of a prompt, for which the next step waits, or needs blocks that a step writes, or would
        leave the other threads with little to do."""
        if plan.encode or any(one.adapters or one.media for one in sequences):
            return True
        if any(chunk.length < one.prompt_len for chunk, one in zip(plan.chunks, sequences, strict=True)):
            return True
        tokens = sum(chunk.length for chunk in plan.chunks)
        beside = plan.tokens_beside + sum(step.tokens for step in self._running)
        if tokens > self._most_tokens or tokens * (self.count - 1) > beside or torch.get_num_threads() == 1:
            return True
        # A prefix that is cached; and blocks of a request that was aborted, while its step still writes to them.
        return any(not step.blocks.isdisjoint(one.block_ids) for step in self._running for one in sequences)


class _Step:
    """A step that a thread computes alone. tokens: that it computes. blocks: that it writes to."""

    known_there = False

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        sequences: Sequence[WorkerSequence],
        compute_alone: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.tokens = sum(chunk.length for chunk in plan.chunks)
        self.blocks = {block for one in sequences for block in one.block_ids}
        self._runner, self._sequences, self._compute_alone = runner, sequences, compute_alone
        self._ended = threading.Event()
        self._result: StepResult | BaseException | None = None

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
        except BaseException as error:
            self._result = error
        finally:
            self._ended.set()

    def result(self) -> StepResult:
        """Wait for it."""
        self._ended.wait()
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result


_all: weakref.WeakSet[SideBySide] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is in a kernel must not come back to an interpreter that is gone."""
    for one in list(_all):
        one.end()


def side_by_side(runner: ModelRunner, most_tokens: int) -> SideBySide | None:
    """None: one step is computed at a time. most_tokens: of a step."""
    threads = torch.get_num_threads()
    if runner.device.type != "cpu" or not runner.pools or not 1 < threads <= _MOST_THREADS:
        return None
    alone: Callable[[], None] | None = getattr(kernels.backend(), "compute_alone", None)
    return None if alone is None else SideBySide(runner, threads, most_tokens, alone)
