"""What shape a request's answers are to have: OpenAI's `response_format`, and vLLM's fields beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.params import KINDS, StructuredOutputsParams
from quire.server.responses.errors import ApiError

# vLLM's fields of one shape each -> what StructuredOutputsParams calls it.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
_WHITESPACE = "guided_whitespace_pattern"
_SHAPES = ("response_format", "structured_outputs", *_GUIDED)
FIELDS = (*_SHAPES, _WHITESPACE)

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OF_SCHEMA = {"name", "schema", "strict", "description"}
# vLLM's `structured_outputs`; there is one engine, so that nothing else could be fallen back on.
_OF_STRUCTURED = {
    "json", "regex", "choice", "grammar", "json_object", "structural_tag", "disable_any_whitespace",
    "disable_additional_properties", "whitespace_pattern", "disable_fallback",
}  # fmt: skip


# How the engine's messages about a shape begin.
_REQUEST = re.compile(r"request [^ ]+: ")
_ABOUT = re.compile(rf"(?:{_REQUEST.pattern})?(?:structured_outputs\b:? ?)?(?:(?:{'|'.join(KINDS)})\b:? ?)?")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the answers are to look like. field: the request's, that says so."""

    params: StructuredOutputsParams
    field: str


def about_shape(error: ApiError, field: str | None) -> ApiError:
    """What the engine says of a shape, by the name of the request's field that asked for it."""
    asked = _REQUEST.match(error.message)
    if asked and error.message.startswith(f"{error.param}[", asked.end()):  # it names the very place in the request
        return ApiError(error.status, error.message[asked.end() :], error.param, error.code, error.headers)
    found = _ABOUT.match(error.message)
    ours = error.param in (None, "structured_outputs", "structural_tag")  # which a message may begin with in any case
    if field is None or error.status != 400 or not ours or not found or not found[0]:
        return error
    return ApiError(400, f"{field}: {error.message[found.end() :]}", field, error.code)


def shape_of(body: Any) -> Shape | None:
    """What a checked body says. Raises ApiError for what is no shape, and for two of them."""
    asked = [field for field in _SHAPES if getattr(body, field, None) is not None]
    made = [shape for shape in (_of(field, getattr(body, field)) for field in asked) if shape is not None]
    if len(made) > 1:
        first, second = made[0].field, made[1].field
        raise ApiError(400, f"{second}: {first} says already what answers look like; give one of them.", second)
    shape = made[0] if made else None
    pattern = getattr(body, _WHITESPACE, None)
    return shape if pattern is None else _spaced(shape, pattern)


def _of(field: str, given: Any) -> Shape | None:
    try:
        if field == "response_format":
            params = _of_format(given)
        elif field == "structured_outputs":
            params = _of_structured(given)
        else:
            params = StructuredOutputsParams(**{_GUIDED[field]: given})
    except RequestError as error:
        text = str(error).removeprefix("structured_outputs ")
        raise ApiError(400, f"{field}: {text}", field) from None
    return None if params is None else Shape(params, field)


def _of_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind not in _TYPES:
        raise RequestError(f"type is one of {', '.join(_TYPES)}, not {str(kind)[:40]!r}.")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    if kind == "json_schema":
        return _of_schema(given.get("json_schema"))
    schema = given.get("schema")  # of other servers, and clients that were written for them
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError("schema must be an object.")
    return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)


def _of_schema(given: Any) -> StructuredOutputsParams:
    if not isinstance(given, Mapping):
        raise RequestError("json_schema must be an object with name and schema.")
    name, schema, strict = given.get("name"), given.get("schema"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError("json_schema.name must have 1 to 64 letters, digits, underscores and dashes.")
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError("json_schema.schema must be a JSON schema; json_object is any JSON object.")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError("json_schema.strict must be true or false; answers match the schema in any case.")
    unknown = sorted(set(given) - _OF_SCHEMA)
    if unknown:
        raise RequestError(f"json_schema has {', '.join(sorted(_OF_SCHEMA))}, no {unknown[0][:40]!r}.")
    return StructuredOutputsParams(json=schema)


def _of_structured(given: Mapping[str, Any]) -> StructuredOutputsParams:
    unknown = sorted(set(given) - _OF_STRUCTURED)
    if unknown:
        raise RequestError(f"there is no {unknown[0][:40]!r}; it has {', '.join(sorted(_OF_STRUCTURED))}.")
    return StructuredOutputsParams(**{name: value for name, value in given.items() if name != "disable_fallback"})


def _spaced(shape: Shape | None, pattern: str) -> Shape:
    if shape is None or (shape.params.json is None and not shape.params.json_object):
        raise ApiError(400, f"{_WHITESPACE}: is for answers in JSON, and none is asked for.", _WHITESPACE)
    if shape.params.whitespace_pattern is not None:
        raise ApiError(400, f"{_WHITESPACE}: {shape.field} has a whitespace_pattern; give one of them.", _WHITESPACE)
    try:
        return replace(shape, params=replace(shape.params, whitespace_pattern=pattern))
    except RequestError as error:
        raise ApiError(400, f"{_WHITESPACE}: {error}", _WHITESPACE) from None
