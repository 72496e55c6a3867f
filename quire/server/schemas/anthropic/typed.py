"""What the `anthropic` package says of a request, as pydantic models that refuse what it does not say.

Its TypedDicts are for type checkers: pydantic would pass over further keys. Importing the package takes a second, so
this is imported when the first such request comes.
"""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Optional, Required, Union, get_args, get_origin

from anthropic import types
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from typing_extensions import is_typeddict

from quire.server.responses.errors import ApiError
from quire.server.schemas.fields import FIRST_FAULT

_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def hints_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Of a TypedDict's fields the type, and whether it must be there."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        mark = get_origin(hint)
        bare = get_args(hint)[0] if mark in (Required, NotRequired) else hint
        found[name] = (bare, mark is Required or (mark is not NotRequired and kind.__total__))
    return found


def json_type(hint: Any) -> Any:
    """A type as JSON has it: lists for what is iterated, models for TypedDicts, no files; checked to a first fault."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        parts = [json_type(part) for part in inner if not _is_file(part)]
        return Union[tuple(parts)]  # noqa: UP007 (made at run time)
    if origin in _LISTS or getattr(origin, "__name__", "") == "SequenceNotStr":
        return Annotated[list[json_type(inner[0])], FIRST_FAULT]  # type: ignore[misc]
    if origin is dict:
        return dict[str, Any]
    return model_of(hint.__name__) if is_typeddict(hint) else hint


def _is_file(hint: Any) -> bool:
    """Whether it is something that the package reads files from, before it sends them."""
    return hint is not type(None) and getattr(hint, "__name__", "") in ("IO", "PathLike", "Base64FileInput")


@cache
def model_of(name: str) -> type[BaseModel]:
    """A TypedDict of the package's as a model. What has contents of its own (blocks in blocks) is checked by itself."""
    loose = {"cache_control": dict[str, Any], **_LOOSE.get(name, {})}  # a hint, whatever it says
    fields: dict[str, Any] = {}
    kind = getattr(types, name, None)
    for field, (hint, required) in (hints_of(kind) if kind is not None else _NEWER[name]).items():
        taken = loose.get(field) or json_type(hint)
        fields[field] = (taken, ...) if required else (Optional[taken], None)  # noqa: UP045 (made at run time)
    return create_model(name, __base__=_Strict, **fields)


_BLOCKS = str | list[dict[str, Any]]
_LOOSE: Mapping[str, Mapping[str, Any]] = {
    "TextBlockParam": {"citations": Any},
    "ImageBlockParam": {"source": dict[str, Any]},
    "DocumentBlockParam": {"source": dict[str, Any]},
    "ContentBlockSourceParam": {"content": _BLOCKS},
    "ToolUseBlockParam": {"caller": Any},
    "ToolResultBlockParam": {"content": _BLOCKS},
    "ToolParam": {"input_schema": dict[str, Any]},
    "OutputConfigParam": {"format": dict[str, Any]},
}
# What older versions of the package do not have.
_NEWER: Mapping[str, Mapping[str, tuple[Any, bool]]] = {
    "ThinkingConfigAdaptiveParam": {
        "type": (Literal["adaptive"], True),
        "display": (Literal["summarized", "omitted"], False),
    },
    "OutputConfigParam": {"effort": (Literal["low", "medium", "high", "xhigh", "max"], False), "format": (Any, False)},
}


def read(name: str, given: Mapping[str, Any], where: str) -> Any:
    """An object of the package's type of this name. Raises ApiError, which says where the first fault is."""
    try:
        return model_of(name).model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{where}{place}: there is no such field.", _field(where)) from None
        raise ApiError(400, f"{where}{place}: {first['msg']}", _field(where)) from None


def _field(where: str) -> str:
    """The request's field in which a place lies."""
    return where.partition("[")[0].partition(".")[0]
