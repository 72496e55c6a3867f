"""When things happened to requests: written by the scheduler, read by whoever makes outputs or watches the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time went. Times are seconds of `time.monotonic()`: only their differences mean
    anything.

    None: it has not happened (yet).
    time_in_queue: first_scheduled_time - arrival_time.
    num_preemptions: how often the request lost its blocks for a while.
    num_cached_tokens: prompt tokens that were found in the prefix cache instead of computed.
    num_generation_tokens: of all its sequences, once it has finished.
    num_draft_tokens, num_accepted_tokens: draft tokens that were computed for it, and those among them that were drawn.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def copy(self) -> RequestMetrics:
        """As they stand; `dataclasses.replace` takes several times as long, and each output has a copy."""
        return RequestMetrics(*_values(self))


_values = attrgetter(*RequestMetrics.__slots__)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that came to their end in a step, one for each sequence or request that they are of.

    gaps: from a sequence's last token to the next. first_tokens: from a request's arrival to its first token.
    queued: from its arrival until it had blocks.
    """

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)

    def token(self, since_arrival: float | None, since_last: float | None) -> None:
        """A sequence got a token. None: it was not its request's first, or was the sequence's first."""
        if since_arrival is not None:
            self.first_tokens.append(since_arrival)
        if since_last is not None:
            self.gaps.append(since_last)

    def clear(self) -> None:
        for times in (self.gaps, self.first_tokens, self.queued):
            times.clear()
