"""Errors as clients expect them: {"error": {"message", "type", "param", "code"}} as OpenAI's API has them, and on the
routes of Anthropic's as that has them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from quire.errors import (
    AdapterError,
    ContextLengthError,
    EngineClosedError,
    OverloadedError,
    QuireError,
    SleepingError,
    UnknownAdapterError,
)
from quire.server.http.gone import ClientGoneError
from quire.server.paths import speaks_anthropic

logger = logging.getLogger("quire.server")

# By status: OpenAI's names for kinds of errors.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_RETRY = {"Retry-After": "5"}

# By status: Anthropic's names, and its number for a server that takes no requests now.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OVERLOADED = {503: 529}

# How messages about a field begin: temperature=..., messages[3].content ..., best_of: ...
_FIELD = re.compile(r"(?:request [^ ]+: )?([a-z_]+)(?=[\[=.:']| must| needs| has | cannot )")
_LONGEST_NAME = 200  # characters of a field's
_LONGEST = 2000  # characters of a message: it may quote what a client sent
_LONGEST_REASON = 200  # characters of a message in the log, which quotes nothing

# What messages quote: values as Python shows them, perhaps cut off, and URLs. And where a template's own words begin.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$))""", re.DOTALL)
_URL = re.compile(r"\b(?:[a-zA-Z][a-zA-Z0-9+.-]*://|data:)\S*")
_TEMPLATES_OWN = "the chat template failed"


def as_json(content: Any) -> bytes:
    """JSON whose texts may quote what a client sent, half a surrogate pair among it, which UTF-8 cannot have."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class Json(JSONResponse):
    """An answer in JSON, as `as_json` writes it."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


class ApiError(Exception):
    """An answer other than success. param: the field that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST else message[:_LONGEST] + " ..."
        self.param = param[:_LONGEST_NAME] if param is not None else None
        self.code = code
        self.headers = headers

    def again(self) -> ApiError:
        """The same, to be raised once more: an error remembers where it was raised."""
        return ApiError(self.status, self.message, self.param, self.code, self.headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return Json(self.body, self.status, dict(self.headers) if self.headers else None)


# What Anthropic's package looks for: its tool runner sends all messages then.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def anthropic_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """An error as Anthropic's API has it."""
    status = _OVERLOADED.get(error.status, error.status)
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **told}, "request_id": request_id}


def response_to(scope: Scope, error: ApiError) -> JSONResponse:
    """The error in the form that who asks expects."""
    if not speaks_anthropic(scope):
        return error.response
    body = anthropic_body(error, scope.get("state", {}).get("request_id"))
    return Json(body, _OVERLOADED.get(error.status, error.status), dict(error.headers) if error.headers else None)


class ErrorDetail(BaseModel):
    """What was wrong. param: the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer other than success."""

    error: ErrorDetail


# For the document: what any route may answer.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The request cannot be served as it is.",
        401: "The API key is missing or wrong.",
        403: "This is not allowed.",
        404: "There is no such route, model or adapter.",
        405: "The route has other methods.",
        408: "The body did not come in time.",
        409: "The server is in no state for this.",
        413: "The body is too large.",
        422: "The adapter is refused.",
        429: "Too many requests wait.",
        500: "A fault of the server's.",
        503: "The engine sleeps, is shutting down, or has failed.",
    }.items()
}


class AnthropicErrorDetail(BaseModel):
    """What was wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Every answer other than success, on the routes of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


DOCUMENTED_ANTHROPIC: dict[int | str, dict[str, Any]] = {
    _OVERLOADED.get(int(status), status): {**told, "model": AnthropicErrorAnswer} for status, told in DOCUMENTED.items()
}


def no_model(name: str) -> ApiError:
    """Nothing of this name is served."""
    message = f"model: there is no {name[:200]!r} here; /v1/models lists what there is."
    return ApiError(404, message, "model", "model_not_found")


def as_api_error(error: BaseException, fields: Sequence[str] = ()) -> ApiError:
    """What to answer when this was raised. fields: names of the request's, one of which the message may begin with.

    Of what is no fault of the client's nothing is told but that it happened: it stands in the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, SleepingError):
        return ApiError(503, str(error), code="engine_sleeping", headers=_RETRY)
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_unavailable", headers=_RETRY)
    if isinstance(error, UnknownAdapterError):  # it was there when the request was looked at
        return no_model(error.name)
    if isinstance(error, AdapterError):
        return ApiError(422, str(error), code="adapter_refused")
    if isinstance(error, ContextLengthError):
        field = error.field if error.field in fields else "messages" if "messages" in fields else error.field
        return ApiError(400, str(error.about(field)), param=field, code=error.code)
    if isinstance(error, QuireError):
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), param=found[1] if found and found[1] in fields else None)
    if isinstance(error, ClientGoneError):
        return ApiError(499, "the client closed the connection")  # nginx's number; nobody will see it
    logger.error("unexpected", exc_info=error)
    return ApiError(500, "an unexpected error; the server's log has it under this request's id (X-Request-Id)")


def remember(scope: MutableMapping[str, Any], error: ApiError) -> None:
    """Have the request's line in the log say which field was wrong, and why, in words that quote nothing of it."""
    facts = scope.setdefault("state", {}).setdefault("facts", {})
    facts.setdefault("field", None if error.param is None else re.sub(r"[^\w.\[\]-]", "?", error.param[:80]))
    facts.setdefault("error", _reason(error))


def _reason(error: ApiError) -> str:
    text = error.message.removeprefix(f"{error.param}: ") if error.param else error.message
    before, failed, _ = text.partition(_TEMPLATES_OWN)
    text = _QUOTED.sub("'...'", _URL.sub("(a URL)", before)) + failed
    return " ".join(text.split())[:_LONGEST_REASON]


def install_handlers(app: FastAPI) -> None:
    """Have every error that a route raises answered in this form, and remembered for the log."""

    def answer(request: Request, error: ApiError) -> JSONResponse:
        remember(request.scope, error)
        return response_to(request.scope, error)

    async def of_route(request: Request, error: Exception) -> JSONResponse:
        return answer(request, as_api_error(error))

    async def of_schema(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(request, _schema_error(error))

    async def of_routing(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            path = request.scope["path"][:200]  # its URL has what the client calls this host, perhaps no host's name
            message = f"there is no {request.method} {path} here; /openapi.json lists the routes"
        return answer(request, ApiError(error.status_code, message, headers=error.headers))

    app.add_exception_handler(RequestValidationError, of_schema)
    app.add_exception_handler(HTTPException, of_routing)
    for kind in (ApiError, QuireError, EngineClosedError, ClientGoneError, Exception):
        app.add_exception_handler(kind, of_route)


def _schema_error(error: RequestValidationError) -> ApiError:
    """Names the first field that is wrong, and what it should be."""
    first = error.errors()[0]
    place = list(first["loc"])
    if place and place[0] in ("body", "query", "path"):  # where it stands; a field may be called so, too
        del place[0]
    if isinstance(first.get("input"), bytes):  # as it came
        return ApiError(400, "the body was not taken for JSON: send Content-Type: application/json.")
    if first["type"] == "json_invalid" or not place or not isinstance(place[0], str):
        return ApiError(400, f"the body is no JSON object: {first.get('ctx', {}).get('error', first['msg'])}")
    field = place[0][:_LONGEST_NAME]
    if first["type"] == "extra_forbidden":
        way_out = "take it out (or start the server with --unknown-fields warn)"
        return ApiError(400, f"{field}: there is no such field: {way_out}.", param=field)
    # A field that may be several things has an error for each of them.
    told = dict.fromkeys(e["msg"] for e in error.errors() if place[0] in e["loc"])
    where = "".join(f"[{part}]" if isinstance(part, int) else "" for part in place[1:2])
    return ApiError(400, f"{field}{where}: {'; or: '.join(list(told)[:4])}", param=field)
