"""The way from an engine to a worker's process, wherever that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from quire.config import EngineConfig


class Link(Protocol):
    """The way to a worker's process.

    steps: plans go there and results come back; errands: a connection for each thread that runs them (reading adapters,
    compiling grammars).
    """

    @property
    def steps(self) -> Connection: ...

    @property
    def errands(self) -> Sequence[Connection]: ...

    def pixels(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
        """Send tensors beside the steps, or in the message that this returns: what the worker is told of them."""
        ...

    def ending(self, seconds: float = 0) -> str | None:
        """Why the process has ended, if it has within so many seconds. Any thread may ask."""
        ...

    def end(self) -> None:
        """End the process: it has nothing to save."""
        ...


def errands_at_once(config: EngineConfig) -> int:
    """How many connections for errands a link has."""
    return 1 + (config.lora.workers if config.lora.enabled else 0)
