"""How fast things go: from counts since the engine began to rates of the last seconds."""

from __future__ import annotations

from collections import deque

from quire.platform.engine.watching.snapshot import Counts

_WINDOW = 5.0  # seconds


class Rates:
    """Of the last five seconds, or of as many as there are."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Counts]] = deque()

    def take(self, time: float, counts: Counts) -> dict[str, float | None]:
        """The rates with these counts as the newest. None: nothing to tell them from."""
        self._seen.append((time, counts))
        while len(self._seen) > 2 and self._seen[1][0] <= time - _WINDOW:
            self._seen.popleft()
        begun, before = self._seen[0]
        seconds = time - begun

        def rate(name: str) -> float | None:
            more: int = getattr(counts, name) - getattr(before, name)
            return round(max(0, more) / seconds, 3) if seconds > 0 else None

        queries = counts.prefix_queries - before.prefix_queries
        return {
            "prompt_tokens_per_second": rate("prompt_tokens"),
            "output_tokens_per_second": rate("output_tokens"),
            "requests_per_second": rate("ended_requests"),
            "cache_hit_rate": round((counts.prefix_hits - before.prefix_hits) / queries, 4) if queries > 0 else None,
        }
