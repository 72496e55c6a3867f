"""Adapters loaded beside an event loop, in two steps: what was read and checked is published later, or dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.lora import LoadReport, StagedAdapter
from quire.platform.engine.lora_admin import LoRAAdmin
from quire.platform.engine.step_loop import StepLoop


class AdapterLoading:
    """For one event loop."""

    def __init__(self, admin: LoRAAdmin, step_loop: StepLoop) -> None:
        self._admin = admin
        self._step_loop = step_loop

    async def stage(self, name: str, path: str, load_inplace: bool = False) -> StagedAdapter:
        """Read an adapter that `name` is to stand for once it is published. Raises AdapterError."""
        try:
            return await asyncio.to_thread(self._admin.stage, name, path, load_inplace)
        except RuntimeError:  # its workers take nothing any more
            self._step_loop.check_runs()
            raise

    def publish(self, staged: StagedAdapter, gone: Callable[[], object] | None = None) -> LoadReport:
        """Let a name stand for what was staged. Raises AdapterError.

        gone: called, in any thread, once nobody needs its files any more.
        """
        report = self._admin.publish(staged, gone)
        self._step_loop.notify()  # an older version may be free to go
        return report
