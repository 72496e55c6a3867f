"""/v1/responses: responses made, and those that are kept asked for, listed, cancelled and deleted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from openai.types.responses import Response as ResponseObject
from pydantic import BaseModel
from pydantic_core import from_json

from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.deferred import owner_of
from quire.server.response_store import FLAG, StoredResponse
from quire.server.responses.builder import Stream, adapter_of
from quire.server.responses.errors import ApiError, Json, as_api_error
from quire.server.responses.responses_answer import EVENTS, ResponsesAnswer, replayed
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.openai import ChatRequest, check_fields, untyped
from quire.server.schemas.responses.call import ResponsesCall
from quire.server.schemas.responses.fields import ACCEPTED_IN_RESPONSES, REFUSED_IN_RESPONSES, ResponsesRequest
from quire.server.schemas.responses.options import about_response

router = APIRouter(route_class=JsonRoute)

_MAX_LISTED = 100
_EITHER: dict[int | str, dict[str, Any]] = {200: {"model": ResponseObject, "content": {EVENTS: {}}}}


class DeletedResponse(BaseModel):
    """A response that is kept no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(BaseModel):
    """A part of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("/v1/responses", responses=_EITHER)
async def create_response(body: ResponsesRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Answer an input of items, pictures in it included."""
    context, fields = context_of(request), untyped(body)
    lenient = context.config.unknown_fields == "warn"
    note_ignored(request, check_fields(fields, REFUSED_IN_RESPONSES, lenient, ACCEPTED_IN_RESPONSES))
    adapter = await adapter_of(context, request, fields.model)
    note(request, model=context.served.name_of(fields.model), user=fields.user or fields.safety_identifier)
    call: ResponsesCall | None = None
    try:
        call = ResponsesCall(context, request, fields)
        answer = ResponsesAnswer(context, request, call)
        if fields.background:
            return await answer.run_in_background(call.read, adapter)
        return await answer.run(call.read, adapter, call.sequences, bool(fields.stream))
    except Exception as error:
        told = as_api_error(error, list(ChatRequest.model_fields))
        raise about_response(told if call is None else call.about(told)) from error


@router.get("/v1/responses/{response_id}", responses=_EITHER)
async def retrieve_response(
    response_id: str, request: Request, stream: bool = False, starting_after: int | None = None
) -> Response:
    """A response that is kept, as it is now; or its events, after one of them."""
    stored = _find(context_of(request), request, response_id)
    if request.query_params.keys() & {"include", "include[]"}:
        note_ignored(request, ["include"])  # what there is of it is there
    if not stream:
        if starting_after is not None:
            raise ApiError(400, "starting_after: is for stream=true.", "starting_after")
        return _as_it_is(stored)
    if stored.events is None:
        raise ApiError(
            400, "stream: only what was made with background=true and stream=true has events that are kept.", "stream"
        )
    place = 0 if starting_after is None else max(0, starting_after + 1)
    return Stream(replayed(stored, place), ExitStack(), EVENTS)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> DeletedResponse:
    """Forget a response; one in the making is cancelled."""
    context = context_of(request)
    stored = _find(context, request, response_id)
    if stored.running is not None:
        stored.running.cancel()
    context.responses.forget(stored)
    return DeletedResponse(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", responses={200: {"model": ResponseObject}})
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response that is in the making. One that has ended stays as it is."""
    stored = _find(context_of(request), request, response_id)
    if stored.running is not None:
        stored.running.cancel()
    return _as_it_is(stored)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: int = Query(20, ge=1, le=_MAX_LISTED),
    order: Literal["asc", "desc"] = "desc",
) -> ItemList:
    """The items of a response's own input: of what it goes on from, that response has them."""
    context = context_of(request)
    stored = _find(context, request, response_id)
    items: list[dict[str, Any]] = await context.engine.on_reader(from_json, stored.items)
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: there is no item {after[:200]!r} in this response's input.", "after")
        items = items[place + 1 :]
    data = items[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return ItemList(data=data, first_id=first, last_id=last, has_more=len(items) > len(data))


def _find(context: ServerContext, request: Request, response_id: str) -> StoredResponse:
    store = context.responses
    stored = store.find(response_id, owner_of(request.scope, context.config))
    if stored is None:
        why = "or it has been forgotten" if store.is_on else f"as this server keeps none ({FLAG})"
        raise ApiError(404, f"response_id: there is no response {response_id[:200]!r}, {why}.", "response_id")
    return stored


def _as_it_is(stored: StoredResponse) -> Response:
    if stored.body is not None:
        return Response(stored.body, media_type="application/json")
    assert stored.running is not None
    return Json(stored.running.snapshot())
