"""What a step's results mean for a beam search: which beams go on, branch and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.platform.sampling.results import Failure, Sampled
from quire.platform.scheduling.request import FinishReason, Request, SequenceState


class Changes(NamedTuple):
    """What may be done to sequences: the scheduler's own functions. fork: another sequence, with an index, goes on as
    one does."""

    fail: Callable[[Request, Failure], None]
    finish: Callable[[SequenceState, FinishReason], None]
    fork: Callable[[SequenceState, int], SequenceState]


def take_candidates(beam: SequenceState, sampled: Sampled, changes: Changes) -> list[SequenceState]:
    """Keep a beam's candidates until its siblings have theirs too: then the best beams go on. An error ends the whole
    search. Returns the sequences that have advanced or ended."""
    request = beam.request
    beams = request.sequences
    if sampled.error is not None:
        changes.fail(request, sampled.error)
        return beams
    beam.offer(sampled.logprobs)
    return [] if any(one.candidates is None for one in beams) else _advance(request, changes)


def _advance(request: Request, changes: Changes) -> list[SequenceState]:
    """All beams have their candidates: keep the best and drop the rest."""
    assert request.beam is not None
    beams = list(request.sequences)
    kept = request.beam.choose(beams)
    parents_used: set[int] = set()
    branches = []
    for candidate in kept:
        branch = beams[candidate.parent]
        if branch.id in parents_used:
            branch = changes.fork(branch, max(s.index for s in request.sequences) + 1)
        branches.append(branch)
        parents_used.add(branch.id)
    for branch, candidate in zip(branches, kept, strict=True):
        branch.append_candidate(candidate)
    for beam in beams:
        if beam.id not in parents_used:
            changes.finish(beam, "stop")
    request.keep(branches or beams)
    return request.sequences
