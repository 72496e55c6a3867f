"""The executor whose worker is in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from quire.config import EngineConfig
from quire.errors import WorkerDiedError
from quire.lora import AdapterReader
from quire.lora.adapter import Adapter
from quire.models.base import CausalLM
from quire.platform.execution.executor import Execution, lost_plan
from quire.platform.execution.side_by_side import side_by_side
from quire.platform.execution.worker import Worker
from quire.platform.kv.connector import TransferReport
from quire.platform.scheduling.plan import StepPlan


class InProcessExecutor:
    """Calls the worker. What its methods mean, `Executor` says."""

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self.worker = Worker(config, path)
        self.runner = self.worker.runner
        self.facts = self.worker.facts
        self._side = side_by_side(self.runner, config.scheduler.max_num_batched_tokens)
        # One waits for the first thread that is done.
        self.steps_at_once = 1 if self._side is None else self._side.count + 1
        self._broken: str | None = None

    def prepare(self, plan: StepPlan) -> None:
        if self._broken is not None:
            raise WorkerDiedError(self._broken)
        try:
            if self._side is not None:
                self._side.prepare(plan)
            self.runner.prepare(plan)
        except BaseException as error:
            if plan.moves:  # nobody knows how far it came, and blocks may not hold what their sequences take them for
                self._broken = lost_plan(error)
            raise
        if self._side is not None:
            self._side.raise_interrupt()

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        self.runner.take_pixels(digest, inputs)

    def execute(self, plan: StepPlan) -> Execution:
        return self.runner.execute(plan) if self._side is None else self._side.execute(plan)

    def structure(self) -> CausalLM:
        return self.worker.model

    def adapter_reader(self) -> AdapterReader:
        assert self.worker.reader is not None
        return self.worker.reader

    def connect_adapters(self, weights: Callable[[int], Adapter]) -> None:
        self.worker.weights = weights

    def remote_grammars(self) -> None:
        return None

    def connect_transfers(self, told: Callable[[], object]) -> None:
        """told: called by any thread, once blocks have been read from beside the pool."""
        if self.runner.transfers is not None:
            self.runner.transfers.told = told

    def take_transfers(self, seconds: float = 0.0) -> TransferReport:
        return TransferReport() if self.runner.transfers is None else self.runner.transfers.report(seconds)

    def check_memory(self) -> None:
        self.worker.memory.check()

    def give_memory_back(self) -> None:
        self.worker.memory.give_back()

    def take_blocks(self) -> None:
        self.worker.memory.take_blocks()

    def read_weights(self) -> None:
        self.worker.memory.read_weights()

    def health_error(self) -> str | None:
        return self._broken

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
        self.worker.close()
