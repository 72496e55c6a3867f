"""What is asked of every family's rows beside the engine's own comparisons (`tests/platform/engine/parity.py`)."""

from __future__ import annotations

from typing import Any

from quire import LLM


def recorded_shapes(llm: LLM) -> list[Any]:
    """Shapes of decode steps that were recorded, and are replayed without Python."""
    shapes = llm.llm_engine.executor.runner._decode._shapes  # nothing public says it
    return [shape for shape, recording in shapes.items() if recording is not None]
