"""GET /v1/engine/events: the engine as it is, again and again, for pages and terminals that show it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from quire.server.context import context_of
from quire.server.events.hub import LEAST_RATE, MOST_RATE, USUAL_RATE
from quire.server.responses.builder import Stream

router = APIRouter()


@router.get("/v1/engine/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def engine_events(
    request: Request,
    rate: Annotated[float, Query(ge=LEAST_RATE, le=MOST_RATE, allow_inf_nan=False)] = USUAL_RATE,
) -> Response:
    """Blocks, requests, steps, adapters and rates as server-sent events, `rate` a second at most; no texts. 429 while
    sixteen watch."""
    events = context_of(request).events
    with ExitStack() as held:  # handed over to the stream
        watcher = held.enter_context(events.joined(rate))
        return Stream(events.events(watcher), held.pop_all(), "text/event-stream")
