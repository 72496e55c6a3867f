"""Doing again what a function asked of a GPU, without Python: CUDA graphs, in the shape of `recording.py`.

A function that starts the same kernels on the same addresses each time is captured once; a replay is one launch. Its
inputs are changed in place. What would wait for the GPU, or read a number from it, cannot be captured.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.kernels.recording import NotRecordable, place_of


class Workspace:
    """A stream to capture on, and memory for the tensors that captured functions make; all graphs of one share it.

    What a function returns keeps its memory for as long as its graph is kept; let it be small.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        # A pool that no graph uses any more cannot be used again: this one always does.
        self._anchor = _capture(lambda: torch.empty(1, device=device).fill_(0), self)


@dataclass(frozen=True)
class Graph:
    """A captured function and, in `results`, what it returned: the tensors that a replay writes."""

    results: Any
    _graph: torch.cuda.CUDAGraph = field(repr=False)

    def replay(self) -> None:
        self._graph.replay()


def record(function: Callable[[], Any], workspace: Workspace, operations: Collection[str] = ()) -> Graph:
    """Capture `function`, which has run in this process before, and replay it once. operations: of torch's, all are.

    What it reads (weights, caches, inputs) must stay where it is for as long as the graph is used. Raises
    NotRecordable.
    """
    try:
        graph = _capture(function, workspace)
    except RuntimeError as error:
        place = place_of(traceback.extract_tb(error.__traceback__))
        raise NotRecordable(f"it cannot be captured ({place}: {str(error).splitlines()[0]})") from error
    graph.replay()
    return graph


def _capture(function: Callable[[], Any], workspace: Workspace) -> Graph:
    # Not by torch.cuda.graph: it empties torch's caches first, and leaves its stream in force where a capture fails.
    graph = torch.cuda.CUDAGraph()
    workspace.stream.wait_stream(torch.cuda.current_stream(workspace.stream.device))
    with torch.cuda.stream(workspace.stream):
        # Other threads may use the GPU meanwhile (images, adapters): only what this one does must be fit for it.
        graph.capture_begin(pool=workspace.pool, capture_error_mode="thread_local")
        try:
            results = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it says that the capture has failed
                graph.capture_end()
            raise
        graph.capture_end()
    return Graph(results, graph)
