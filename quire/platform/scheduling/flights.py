"""Plans that run, and that are counted as done until they are committed: the next ones are made meanwhile."""

from __future__ import annotations

from collections import Counter

from quire.platform.scheduling.plan import Chunk, StepPlan


class Flights:
    """Which plans these are. Of those that are held, which sequences they are of, as nothing is known of what they
    draw: a sequence that gets something goes on once it is there, and none begins anew while it is in one."""

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self._named: Counter[int] = Counter()  # sequences, by id: so many held plans compute something of each
        self.owed: set[int] = set()  # those that wait for what one of them gives

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def begin(self, plan: StepPlan) -> None:
        self._numbers.add(plan.number)

    def hold(self, plan: StepPlan) -> None:
        """As `begin`, for a plan whose sequences wait for it."""
        self.begin(plan)
        self._named.update(chunk.sequence_id for chunk in plan.chunks)
        self.owed.update(chunk.sequence_id for chunk in plan.chunks if _gives(chunk))

    def end(self, plan: StepPlan) -> bool:
        """A plan runs no more. False: it was none of these."""
        if plan.number not in self._numbers:
            return False
        self._numbers.remove(plan.number)
        if not self._named:
            return True
        for chunk in plan.chunks:
            if self._named[chunk.sequence_id] <= 1:
                del self._named[chunk.sequence_id]
            else:
                self._named[chunk.sequence_id] -= 1
            if _gives(chunk):
                self.owed.discard(chunk.sequence_id)
        return True

    def names(self, sequence_id: int) -> bool:
        """Whether one of them computes something of a sequence."""
        return sequence_id in self._named


def _gives(chunk: Chunk) -> bool:
    return bool(chunk.draws) or chunk.score is not None
