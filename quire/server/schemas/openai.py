"""The bodies of requests, as pydantic models, which FastAPI checks and documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Optional

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from quire.server.responses.errors import ApiError
from quire.server.schemas.fields import (
    ACCEPTED,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FIRST_FAULT,
    GENERATE_FIELDS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    Acceptance,
    Refusal,
)

_unknown: ContextVar[list[str] | None] = ContextVar("unknown fields of the bodies that are read", default=None)
_MOST_UNKNOWN = 64  # that are told of


@contextmanager
def passing_over_unknown() -> Iterator[list[str]]:
    """Within this, fields that are not known are no error: their names go into the list."""
    names: list[str] = []
    token = _unknown.set(names)
    try:
        yield names
    finally:
        _unknown.reset(token)


class Body(BaseModel):
    """A field that is not known is an error, and so is one of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Of the fields that are not known leave one to complain of: pydantic would list them all."""
        if not isinstance(given, dict):
            return given
        known = {name: value for name, value in given.items() if name in cls.model_fields}
        ignored_fields = _unknown.get()
        if ignored_fields is not None:
            for name in given.keys() - known.keys():
                if len(ignored_fields) < _MOST_UNKNOWN:
                    ignored_fields.append(name)
            return known
        unknown = next((name for name in given if name not in known), None)
        return known if unknown is None else {**known, unknown: given[unknown]}


def request_model(
    name: str,
    honoured: Mapping[str, Any],
    accepted: Mapping[str, Acceptance],
    refused: Mapping[str, Refusal],
    required: Mapping[str, Any],
) -> type[Body]:
    fields: dict[str, Any] = {field: (hint, ...) for field, hint in required.items()}
    for field, hint in honoured.items():
        fields.setdefault(field, (Optional[hint], None))  # noqa: UP045 (made at run time)
    for field, refusal in refused.items():
        fields[field] = (Any, Field(None, description=f"Refused, unless neutral: {refusal.why}."))
    for field, acceptance in accepted.items():
        fields[field] = (Any, Field(None, description=f"Changes nothing. {acceptance.why}."))
    return create_model(name, __base__=Body, **fields)


CompletionRequest = request_model("CompletionRequest", COMPLETION_FIELDS, ACCEPTED, REFUSED_IN_COMPLETIONS, {})
CompletionRequest.__doc__ = "OpenAI's /v1/completions, with vLLM's sampling parameters."

ChatRequest = request_model(
    "ChatCompletionRequest", CHAT_FIELDS, ACCEPTED, REFUSED_IN_CHAT, {"messages": CHAT_FIELDS["messages"]}
)
ChatRequest.__doc__ = "OpenAI's /v1/chat/completions, with vLLM's sampling parameters."


GenerateRequest = request_model("GenerateRequest", GENERATE_FIELDS, {}, {}, {"prompt": GENERATE_FIELDS["prompt"]})
GenerateRequest.__doc__ = """The body of /generate: a prompt, and sampling parameters.

wait: false answers at once, with the name under which /result has the texts when they are ready.
"""


def untyped(body: Any) -> Any:
    """A body whose fields were made at run time, so that no type checker knows them."""
    return body


def check_fields(
    body: Body, refused: Mapping[str, Refusal], lenient: bool, accepted: Mapping[str, Acceptance] = ACCEPTED
) -> list[str]:
    """The fields that are passed over, as they change nothing. Raises ApiError for one that asks for what is not
    served; lenient: that is passed over too.
    """
    ignored_fields = []
    for field in sorted(body.model_fields_set):
        value = getattr(body, field)
        acceptance, refusal = accepted.get(field), refused.get(field)
        if acceptance is not None and not acceptance.is_neutral(value):
            ignored_fields.append(field)
        elif refusal is not None and not refusal.allows(value):
            if not lenient:
                raise ApiError(400, f"{field}: {refusal.why}.", param=field, code="unsupported_parameter")
            ignored_fields.append(field)
    return ignored_fields


class TokenizeRequest(Body):
    """A prompt, or messages, to be made tokens. Each image counts as one."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[Any, Field(description=f"Refused: {REFUSED_IN_CHAT['chat_template'].why}.")] = None


class DetokenizeRequest(Body):
    """Token ids to be made text."""

    model: str | None = None
    tokens: Annotated[list[int], FIRST_FAULT]


class MixedAdapter(Body):
    """One part of a mixture."""

    name: str
    weight: float = 1.0


class LoadAdapterRequest(Body):
    """An adapter's folder, or a mixture of loaded adapters, that `lora_name` is to stand for.

    load_inplace: the name may be taken; requests that run finish on the version that they began with.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    adapters: Annotated[list[MixedAdapter], Field(min_length=1, max_length=64)] | None = None
    load_inplace: bool = False
    base_model_name: str | None = None
    is_3d_lora_weight: Annotated[bool, Field(description="Nothing depends on it: the file tells.")] = False


class UnloadAdapterRequest(Body):
    """An adapter, or a mixture, to be forgotten."""

    lora_name: str
    lora_int_id: int | None = None
