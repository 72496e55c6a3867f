"""From a body of /v1/responses to what the engine is asked: a ChatRequest of the same meaning, and its messages."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from quire.platform.inputs.processor import PromptType
from quire.platform.sampling.params import SamplingParams
from quire.server.context import REQUEST_ID, ServerContext, note_ignored
from quire.server.deferred import owner_of
from quire.server.response_store import FLAG, StoredResponse
from quire.server.responses.errors import ApiError, as_api_error, as_json
from quire.server.schemas.chat_options import ChatCall
from quire.server.schemas.fields import REFUSED_IN_CHAT
from quire.server.schemas.openai import check_fields
from quire.server.schemas.responses.items import Item, ItemReader, is_reference
from quire.server.schemas.responses.messages import Conversation
from quire.server.schemas.responses.options import Options
from quire.server.schemas.sampling import Params
from quire.server.schemas.structured import about_shape

PREFIX = "resp_"


class ResponsesCall(ChatCall):
    """What a body asks for.

    given: the body.  options: what it says beside its input.
    id: of the response; name: what the ids of its items are made of.
    owner: who may ask for it later, if it is stored.  store: whether it is to be.
    items: its input as JSON, where it is stored; after `read`.

    Raises ApiError and RequestError for what cannot be served.
    """

    def __init__(self, context: ServerContext, request: Request, given: Any) -> None:
        lenient = context.config.unknown_fields == "warn"
        self.given = given
        self.options = Options(given, lenient)
        chat = self.options.chat
        note_ignored(request, [*check_fields(chat, REFUSED_IN_CHAT, lenient), *self.options.ignored_fields])
        if given.background:  # what it has made so far can be asked for, and is not lost when it is cancelled
            chat = chat.model_copy(update={"stream": True})
        try:
            super().__init__(context, request, chat)
        except Exception as error:
            raise self.options.about(as_api_error(error, list(type(chat).model_fields))) from error
        self.name = _name(given.request_id, context.id_prefix)
        self.id = PREFIX + self.name
        self.owner = owner_of(request.scope, context.config)
        self.store = self._stores()
        self.items = b""
        self._previous = self._chain()
        self._referred = self._references()

    def read(self) -> list[tuple[PromptType, Params]]:
        reader = ItemReader(self._make_id, self._find)
        conversation = Conversation(self.given.instructions)
        try:
            for stored in self._previous:
                conversation.add(from_json(stored.items), "previous_response_id")
                conversation.add(_output(stored), "previous_response_id")
            items = reader.items(self.given.input)
            note_ignored(self._request, reader.ignored_fields)
            conversation.add(items, None)
            if self.store:
                self.items = as_json(items)
            self.body = self.body.model_copy(update={"messages": conversation.messages})
            return super().read()
        except Exception as error:
            raise conversation.about(as_api_error(error, ["messages", *type(self.body).model_fields])) from error

    def about(self, error: ApiError) -> ApiError:
        """An error about what chat is asked as one about this body."""
        return self.options.about(about_shape(error, self.shape_field))

    @property
    def shown(self) -> SamplingParams:
        """How tokens are made text."""
        body = self.body
        return SamplingParams(
            skip_special_tokens=body.skip_special_tokens is not False and not self.format.needs_special_tokens,
            spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        )

    # -- what is kept ---------------------------------------------------------------------------------------------

    def _stores(self) -> bool:
        store, given = self._context.responses, self.given
        if given.background and given.store is False:
            raise ApiError(400, "background: what is not stored (store=false) nobody could ask for.", "background")
        if store.is_on:
            return given.store is not False
        if given.background:
            raise ApiError(400, f"background: needs a server that keeps responses ({FLAG}).", "background")
        if given.previous_response_id is not None:
            raise ApiError(
                400,
                f"previous_response_id: this server keeps no responses ({FLAG}): send the whole conversation as input.",
                "previous_response_id",
                "previous_response_not_found",
            )
        if given.store:
            note_ignored(self._request, ["store"])
        return False

    def _chain(self) -> list[StoredResponse]:
        if self.given.input is None:
            raise ApiError(400, "input: is missing.", "input")
        name = self.given.previous_response_id
        return [] if name is None else self._context.responses.chain(name, self.owner, "previous_response_id")

    def _references(self) -> dict[str, StoredResponse]:
        """The responses that references to items mean: a worker could not look for them."""
        given = self.given.input
        found: dict[str, StoredResponse] = {}
        for item in given if isinstance(given, list) else ():
            if not is_reference(item):
                continue
            if not self._context.responses.is_on:
                raise ApiError(
                    400, f"input: this server keeps no items to refer to ({FLAG}): send the items themselves.", "input"
                )
            name = response_of(item.get("id"))
            stored = self._context.responses.find(name, self.owner) if name is not None else None
            if name is not None and stored is not None and stored.body is not None:
                found[name] = stored
        return found

    def _find(self, item_id: str) -> Item | None:
        stored = self._referred.get(response_of(item_id) or "")
        items: list[Item] = [] if stored is None else [*_output(stored), *from_json(stored.items)]
        return next((item for item in items if item["id"] == item_id), None)

    def _make_id(self, kind: str, place: int) -> str:
        return f"{kind}_{self.name}_i{place}"


def response_of(item_id: Any) -> str | None:
    """The response whose item this is, by the item's id."""
    if not isinstance(item_id, str):
        return None
    name, separator, _ = item_id.partition("_")[2].rpartition("_")
    return PREFIX + name if separator else None


def _output(stored: StoredResponse) -> list[Item]:
    body: Mapping[str, Any] = from_json(stored.body or b"{}")
    output: list[Item] = body["output"]
    return output


def _name(request_id: str | None, prefix: str) -> str:
    """Drawn at random, unless the client says how it is called: nobody can guess another's. prefix: of random ones."""
    if request_id is None:
        return prefix + secrets.token_hex(24)
    if not REQUEST_ID.fullmatch(request_id):
        raise ApiError(400, f"request_id: must match {REQUEST_ID.pattern}.", "request_id")
    return request_id.removeprefix(PREFIX)
