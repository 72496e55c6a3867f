"""What the worker has been told of sequences, and what it is to be told with the next plan."""

from __future__ import annotations

from collections.abc import Mapping

from quire.platform.scheduling.plan import Chunk, ForkedSequence, NewSequence, StepPlan
from quire.platform.scheduling.request import SequenceState


class WorkerView:
    """A sequence's tokens travel once: it is introduced with its first chunk, and each chunk then brings what is new.

    A plan may never reach the worker (an interrupt). Its sequences are introduced anew then; a worker that has had the
    plan after all takes no harm.
    """

    def __init__(self) -> None:
        self._new: list[NewSequence] = []
        self._forks: list[ForkedSequence] = []
        self._ended: list[int] = []
        self._under_way: list[Chunk] = []  # of the plan that has not been delivered yet
        self._forks_under_way = 0  # so many of the forks are in it

    def begin_plan(self, sequences: Mapping[int, SequenceState], chunks: list[Chunk]) -> None:
        """chunks: where those of the plan in the making will be gathered. sequences: that have not finished, by id."""
        if self._under_way or self._forks_under_way:
            self._tell_again(sequences)
        self._under_way, self._forks_under_way = chunks, 0
        self._new.clear()

    def _tell_again(self, sequences: Mapping[int, SequenceState]) -> None:
        """The last plan may not have reached the worker."""
        forks = self._forks[: self._forks_under_way]  # if the worker has had them, it may have lost their parents since
        for sequence_id in [*(chunk.sequence_id for chunk in self._under_way), *(fork.sequence_id for fork in forks)]:
            if sequence_id in sequences:
                sequences[sequence_id].told(0)
        del self._forks[: len(forks)]

    def new_tokens(self, sequence: SequenceState) -> tuple[int, tuple[int, ...]]:
        """The tokens that the worker does not know, and their place; the worker knows them from here on."""
        token_ids, place = sequence.token_ids, sequence.worker_tokens
        known = len(token_ids) - sequence.pending  # the pending one will be another
        if not place:
            self._new.append(sequence.introduce())
            place = known
        sequence.told(known)
        return place, tuple(token_ids[place:])

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """The child goes on with all the tokens of its parent; if the worker has these, it need not be sent them."""
        length = len(child.token_ids)
        if parent.worker_tokens == length:
            self._forks.append(ForkedSequence(child.id, parent.id, length))
            child.told(length)

    def end(self, sequence_id: int) -> None:
        """A sequence has finished."""
        self._ended.append(sequence_id)

    def news(self) -> tuple[tuple[NewSequence, ...], tuple[ForkedSequence, ...], tuple[int, ...]]:
        """What the plan in the making says beside its chunks: (new sequences, forks, ended ones)."""
        self._forks_under_way = len(self._forks)
        return tuple(self._new), tuple(self._forks), tuple(self._ended)

    def delivered(self, plan: StepPlan) -> None:
        """The worker has taken in the last plan."""
        self._under_way, self._forks_under_way = [], 0
        del self._forks[: len(plan.forks)], self._ended[: len(plan.ended)]
