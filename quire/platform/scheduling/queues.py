"""The order of arrival, in which sequences wait and run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from quire.platform.kv.manager import KVManager
from quire.platform.kv.spans import uncut
from quire.platform.scheduling.request import SequenceState

_LOOKED_AT = 64  # sequences that wait: more than a step of short ones has


def enqueue(waiting: deque[SequenceState], sequence: SequenceState) -> None:
    """Put a sequence where its arrival says: mostly last, or first, when it was preempted."""
    if not waiting or waiting[-1].order < sequence.order:
        waiting.append(sequence)
    else:
        place = next(i for i, other in enumerate(waiting) if sequence.order < other.order)
        waiting.insert(place, sequence)


def reads(sequence: SequenceState, kv: KVManager) -> bool:
    """Whether a waiting sequence waits for blocks that are read for it. Beams do not: they wait for one another."""
    return sequence.request.beam is None and kv.waits(sequence.id, sequence.token_ids, sequence.most_cached)


def tokens_beside(waiting: deque[SequenceState], room: int, kv: KVManager) -> int:
    """Tokens for another step right behind the one that is planned: of the sequences at the head of the queue, `room`
    of them at most, if there are blocks for the first."""
    if room <= 0 or not waiting or not kv.fits(len(waiting[0].token_ids), ()):
        return 0
    return sum(len(one.token_ids) for one in islice(waiting, min(room, _LOOKED_AT)))


def check_queues(
    running: Sequence[SequenceState], waiting: Sequence[SequenceState], live: Mapping[int, SequenceState]
) -> None:
    """Raise AssertionError unless each sequence that goes on stands in its queue, and both are in order.

    live: the sequences that have not finished, by id.
    """
    for sequence in live.values():
        home = running if sequence.running else waiting
        if sum(other is sequence for other in home) != 1:
            raise AssertionError(f"sequence {sequence.id} is not in its queue exactly once")
        if not sequence.running and (sequence.num_computed or sequence.held):
            raise AssertionError(f"waiting sequence {sequence.id} holds features, or has computed tokens")
        if uncut(sequence.request.sees, sequence.num_computed) != sequence.num_computed:
            raise AssertionError(f"sequence {sequence.id} has computed a part of a range that is seen as a whole")
    if len(running) + len(waiting) != len(live):
        raise AssertionError("a finished sequence is still queued")
    for queue in (running, waiting):
        if list(queue) != sorted(queue, key=lambda s: s.order):
            raise AssertionError("a queue is out of arrival order")
