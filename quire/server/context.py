"""What the routes share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from quire.config import ServerConfig
from quire.errors import OverloadedError
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.outputs.messages.message_format import MessageFormat
from quire.server.deferred import DeferredAnswers
from quire.server.events.hub import EngineEvents
from quire.server.metrics import Metrics
from quire.server.response_store import ResponseStore
from quire.server.responses.errors import ApiError
from quire.server.served_models import ServedModels

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # what answers, logs and a header may have of a client's name

IGNORED = "X-Quire-Ignored-Fields"  # the header that names what of a request was passed over

_LONGEST_FACT = 256  # characters
_MOST_NAMED, _LONGEST_NAME = 16, 64  # of fields that were passed over


@dataclass
class ServerContext:
    """One server: its engine, its settings, the names that it serves, its metrics, how its model writes messages, how
    many sequences it has, what ids of its own begin with (where others serve beside it), the answers that nobody waits
    for, the responses that are kept, and who watches the engine.
    """

    engine: AsyncEngine
    config: ServerConfig
    served: ServedModels
    metrics: Metrics
    format: MessageFormat = field(default_factory=MessageFormat)
    sequences: int = field(default=0)
    id_prefix: str = ""
    deferred: DeferredAnswers = field(default_factory=DeferredAnswers)
    responses: ResponseStore = field(init=False)
    events: EngineEvents = field(init=False)
    _longest: int | None = None

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_store_bytes)
        self.events = EngineEvents(self.engine, self.served.names[0])

    def longest_token(self) -> int:
        """Characters of the tokenizer's longest token."""
        if self._longest is None:
            tokenizer = self.engine.llm_engine.tokenizer
            self._longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1
        return self._longest

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Count a request's sequences while it is answered. Raises OverloadedError where the queue is full."""
        running = self.engine.llm_engine.config.scheduler.max_num_seqs
        most = running + self.config.max_queue
        if sequences > most:
            raise ApiError(
                400,
                f"n: prompts times n (or best_of) are {sequences} sequences, and {most} is the most there may be.",
                "n",
            )
        if self.sequences + sequences > most:
            raise OverloadedError(
                f"{self.sequences} sequences run or wait, and {running} may run and {self.config.max_queue} wait "
                f"(--max-queue); this request has {sequences}: try again later",
                retry_after=self._retry_after(),
            )
        self.sequences += sequences
        try:
            yield
        finally:
            self.sequences -= sequences

    def _retry_after(self) -> int:
        """Seconds until some have probably finished: what requests took lately, between a second and a minute."""
        return int(min(60, max(1, self.metrics.recent_duration)))


def context_of(request: Request) -> ServerContext:
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def new_id(kind: str, request: Request, given: str | None) -> str:
    """A response's id: of the client's name for the request, where it gave one. Raises ApiError for no such name."""
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise ApiError(400, f"request_id: must match {REQUEST_ID.pattern}.", "request_id")
    return f"{kind}-{given or request.scope.get('state', {}).get('request_id') or secrets.token_hex(12)}"


def note_ignored(request: Request, fields: Iterable[str]) -> None:
    """Name fields that change nothing in the answer's header and in the log. Before the answer begins."""
    state = request.scope.setdefault("state", {})
    state.setdefault("ignored_fields", {}).update(dict.fromkeys(fields))


def ignored_fields(state: Mapping[str, Any]) -> str | None:
    """What `note_ignored` was told, as a header may have it: the names may be anything that a client sent."""
    names = sorted({*state.get("ignored_fields", ()), *state.get("unknown", ())})
    shown = [re.sub(r"[^\w.\[\]-]", "?", name[:_LONGEST_NAME], flags=re.ASCII) for name in names[:_MOST_NAMED]]
    if len(names) > len(shown):
        shown.append(f"+{len(names) - len(shown)}")
    return ", ".join(shown) or None


def note(request: Request, **facts: Any) -> None:
    """Put facts into the line that the log will have of this request."""
    bounded = {name: fact[:_LONGEST_FACT] if isinstance(fact, str) else fact for name, fact in facts.items()}
    request.scope.setdefault("state", {}).setdefault("facts", {}).update(bounded)
