"""What a worker knows of a step that was started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from quire.platform.sampling.results import TopLogprobs
from quire.platform.sampling.sampler import Sampling
from quire.platform.sampling.speculative.check import CheckedSampling
from quire.platform.scheduling.plan import StepPlan, StepResult


@dataclass(frozen=True)
class PreviousTokens:
    """What the last step has drawn: tokens [draws] int64 on the device, and which of them is whose."""

    tokens: torch.Tensor | None = None
    places: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: StepPlan, tokens: torch.Tensor | None) -> PreviousTokens:
        """tokens: one of each chunk that draws."""
        drawing = [chunk.sequence_id for chunk in plan.chunks if chunk.draws]
        return cls(tokens, {one: place for place, one in enumerate(drawing)})

    def places_of(self, ids: Sequence[int]) -> list[int]:
        """Of the sequences' tokens. Raises RuntimeError where the step has failed that was to draw them."""
        if not all(one in self.places for one in ids):
            raise RuntimeError("the step before has failed, which draws tokens that this one goes on from")
        return [self.places[one] for one in ids]


@dataclass(frozen=True)
class RunningStep:
    """A step that was started.

    known_there: all that it draws will be where the next step finds it, so that that can be started before anybody has
    looked.
    """

    plan: StepPlan
    _sampling: Sampling | CheckedSampling | None
    _scores: tuple[tuple[TopLogprobs, ...], ...]
    known_there: bool = False
    pooled: tuple[np.ndarray | None, ...] = ()

    @property
    def ready(self) -> bool:
        """Where nothing is drawn: it was pooled by then."""
        return self._sampling is None

    def result(self) -> StepResult:
        """Wait for it."""
        if isinstance(self._sampling, CheckedSampling):
            checked = iter(self._sampling.result())
            return StepResult(tuple(next(checked) if chunk.draws else () for chunk in self.plan.chunks), self._scores)
        drawn = [] if self._sampling is None else self._sampling.result()
        counts = [len(chunk.draws) for chunk in self.plan.chunks]
        if counts.count(1) == len(counts):
            return StepResult(tuple((one,) for one in drawn), self._scores)
        rest = iter(drawn)
        return StepResult(tuple(tuple(islice(rest, count)) for count in counts), self._scores, self.pooled)


@dataclass(frozen=True)
class HandedOn:
    """A step of which the next stage of a pipeline computes the rest: nothing is drawn here."""

    plan: StepPlan
    known_there = ready = False

    def result(self) -> StepResult:
        """As many empty places as there are chunks."""
        return StepResult(((),) * len(self.plan.chunks), ((),) * len(self.plan.chunks))
