"""What becomes of a step whose sequences generate nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.platform.kv.manager import KVManager
from quire.platform.scheduling.plan import StepPlan, StepResult
from quire.platform.scheduling.request import FinishReason, SequenceState


def take_pooled(
    plan: StepPlan,
    result: StepResult,
    live: Mapping[int, SequenceState],
    kv: KVManager,
    finish: Callable[[SequenceState, FinishReason], None],
) -> list[SequenceState]:
    """Record what was pooled, and finish the sequences whose prompts are computed: these are returned.

    live: those that have not finished, by id. The plan's tokens count as computed already.
    """
    done = []
    for chunk, rows in zip(plan.chunks, result.pooled, strict=True):
        sequence = live.get(chunk.sequence_id)
        if sequence is None:  # aborted while the step ran
            continue
        if sequence.running and not sequence.request.sees:
            kv.publish(sequence.id, sequence.token_ids, chunk.start, chunk.end)
        assert rows is not None
        if sequence.request.take_pooled(chunk, rows):
            finish(sequence, "stop")
            done.append(sequence)
    return done
