"""Doing again what a function asked of a GPU, without Python: CUDA graphs, in the shape of `recording.py`.

A function that starts the same kernels on the same addresses each time is captured once; a replay is one launch. Its
inputs are changed in place. What would wait for the GPU, or read a number from it, cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.kernels.recording import NotRecordable


class Workspace:
    """Memory for the tensors that captured functions make; all graphs of one workspace share it.

    Results are good until another of them is replayed or captured.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class Graph:
    """A captured function and, in `results`, what it returned: the tensors that a replay writes."""

    results: Any
    _graph: torch.cuda.CUDAGraph = field(repr=False)

    def replay(self) -> None:
        self._graph.replay()


def record(function: Callable[[], Any], workspace: Workspace) -> Graph:
    """Capture `function`, which has run in this process before, and replay it once.

    What it reads (weights, caches, inputs) must stay where it is for as long as the graph is used. Raises
    NotRecordable.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may use the GPU meanwhile (images, adapters): only what this one does must be fit for it.
        with torch.cuda.graph(graph, pool=workspace.pool, capture_error_mode="thread_local"):
            results = function()
    except RuntimeError as error:
        raise NotRecordable(f"it cannot be captured ({str(error).splitlines()[0]})") from error
    graph.replay()
    return Graph(results, graph)
