"""What a body of /v1/responses asks for beside its input, as a body of /v1/chat/completions says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from quire.platform.outputs.messages.tool_choice import MAX_TOOLS
from quire.server.responses.errors import ApiError
from quire.server.schemas.openai import ChatRequest, untyped
from quire.server.schemas.responses.fields import SHARED

LOGPROBS = "message.output_text.logprobs"

# What `include` may name, and what of it there is: built-in tools are not called, and reasoning is not encrypted.
_NOTHING_OF = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)  # fmt: skip

_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier")
# /v1/chat/completions' names -> this route's.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_TOOL = re.compile(r"\btools\[(\d+)\](?:\.function)?")
_NO_SUMMARY = ("summary", "generate_summary")
_NEUTRAL_REASONING = {"context": (None, "auto"), "mode": (None, "standard")}
_SUMMARIES = (None, "auto", "concise", "detailed")
_CHOICES = ("none", "auto", "required")
_FORMAT_KEYS = ("name", "description", "schema", "strict")
# Of a function: what is not served asks for nothing with these values.
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, ["direct"])
_NEUTRAL_KEYS = ("defer_loading", "async", "allowed_callers", "output_schema")
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512


class Options:
    """A body's options. chat: the same as a ChatRequest without messages.  ignored_fields: those that change nothing.

    tools, tool_choice: as they were given and are served.
    Raises ApiError for what cannot be served.
    """

    def __init__(self, body: Any, lenient: bool) -> None:
        """lenient: tools that are not served are passed over."""
        self.ignored_fields: list[str] = []
        self._lenient = lenient
        self._places: list[int] = []  # in the body, of the tools that chat has
        _check_metadata(body.metadata)
        _check_stream_options(body)
        self.tools = self._served(body.tools or [])
        self.tool_choice = body.tool_choice if body.tool_choice is not None else "auto"
        self.logprobs = self._logprobs(body)
        given = {name: getattr(body, name) for name in (*_SAME, *SHARED) if name in body.model_fields_set}
        given |= self._tools() | self._text(body.text or {}) | self._reasoning(body.reasoning or {})
        given["max_completion_tokens"] = body.max_output_tokens
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        self.chat = _chat_request(given)

    def _logprobs(self, body: Any) -> int | None:
        """How many alternatives of each token are told; None: nothing is told."""
        included = body.include or []
        unknown = next((name for name in included if name != LOGPROBS and name not in _NOTHING_OF), None)
        if unknown is not None:
            raise ApiError(400, f"include: there is no {unknown[:80]!r}.", "include")
        if any(name in _NOTHING_OF for name in included):
            self.ignored_fields.append("include")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
            raise ApiError(400, "top_logprobs: is from 0 to 20.", "top_logprobs")
        if LOGPROBS in included:
            return body.top_logprobs or 0
        if body.top_logprobs:
            self.ignored_fields.append("top_logprobs")
        return None

    # -- tools ----------------------------------------------------------------------------------------------------

    def _served(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(tools) > MAX_TOOLS:
            raise ApiError(400, f"tools: has {len(tools)} entries, and the limit is {MAX_TOOLS}.", "tools")
        served = []
        for place, tool in enumerate(tools):
            kind = tool.get("type")
            if kind == "function":
                served.append(_function(f"tools[{place}]", tool))
                self._places.append(place)
            elif self._lenient and isinstance(kind, str):
                self.ignored_fields.append(f"tools[].{kind[:64]}")
            else:
                raise ApiError(
                    400,
                    f"tools[{place}].type: {str(kind)[:80]!r} is not served: the model calls functions, which the "
                    "client runs.",
                    "tools",
                    "unsupported_parameter",
                )
        return served

    def _tools(self) -> dict[str, Any]:
        """Both fields. Of tools of which but some may be called the model sees these alone."""
        if not self.tools:
            self._choice({})  # is checked all the same
            return {} if self.tool_choice in ("auto", "none") else {"tool_choice": self.tool_choice}
        functions = {tool["name"]: tool for tool in self.tools}
        choice, allowed = self._choice(functions)
        chosen = [n for n, tool in enumerate(self.tools) if allowed is None or tool["name"] in allowed]
        self._places = [self._places[n] for n in chosen]
        tools = [{"type": "function", "function": _without(self.tools[n], "type")} for n in chosen]
        return {"tools": tools, "tool_choice": choice}

    def _choice(self, functions: Mapping[str, Any]) -> tuple[Any, set[str] | None]:
        """(tool_choice as chat has it, the names of those that may be called; None: all)"""
        given = self.tool_choice
        if isinstance(given, str):
            if given not in _CHOICES:
                raise ApiError(400, "tool_choice: is none, auto, required, or an object.", "tool_choice")
            return given, None
        kind = given.get("type")
        if kind == "function":
            return {"type": "function", "function": {"name": self._named(given, functions)}}, None
        if kind != "allowed_tools":
            raise ApiError(
                400, f"tool_choice.type: {str(kind)[:80]!r} is not served: function and allowed_tools are.",
                "tool_choice", "unsupported_parameter",
            )  # fmt: skip
        tools = given.get("tools")
        if given.get("mode") not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise ApiError(400, "tool_choice: allowed_tools have a mode, auto or required, and tools.", "tool_choice")
        return given["mode"], {self._named(tool, functions) for tool in tools}

    @staticmethod
    def _named(given: Any, functions: Mapping[str, Any]) -> str:
        name = given.get("name") if isinstance(given, Mapping) and given.get("type") == "function" else None
        if not isinstance(name, str) or name not in functions:
            raise ApiError(400, f"tool_choice: there is no function {str(name)[:80]!r} in tools.", "tool_choice")
        return name

    def about(self, error: ApiError) -> ApiError:
        """An error about tools as chat has them as one about this body's."""

        def place(found: re.Match[str]) -> str:
            index = int(found[1])
            return f"tools[{self._places[index] if index < len(self._places) else index}]"

        if error.param != "tools":
            return error
        return ApiError(error.status, _TOOL.sub(place, error.message), error.param, error.code, error.headers)

    # -- text and reasoning ---------------------------------------------------------------------------------------

    def _text(self, given: dict[str, Any]) -> dict[str, Any]:
        _check_keys("text", given, ("format", "verbosity"))
        made = {"verbosity": given["verbosity"]} if given.get("verbosity") is not None else {}
        wanted = given.get("format")
        if wanted is None:
            return made
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        if kind in ("text", "json_object"):
            _check_keys("text.format", wanted, ("type",))
            return {**made, "response_format": {"type": kind}}
        if kind != "json_schema":
            raise ApiError(400, "text.format: its type is text, json_object or json_schema.", "text.format")
        _check_keys("text.format", wanted, ("type", *_FORMAT_KEYS))
        if not isinstance(wanted.get("schema"), dict):
            raise ApiError(400, "text.format.schema: must be a JSON schema.", "text.format")
        if not isinstance(wanted.get("name"), str):
            raise ApiError(400, "text.format.name: must be a text.", "text.format")
        schema = {key: wanted[key] for key in _FORMAT_KEYS if wanted.get(key) is not None}
        return {**made, "response_format": {"type": kind, "json_schema": schema}}

    def _reasoning(self, given: dict[str, Any]) -> dict[str, Any]:
        _check_keys("reasoning", given, ("effort", *_NO_SUMMARY, *_NEUTRAL_REASONING))
        for key, neutral in _NEUTRAL_REASONING.items():
            if given.get(key) not in neutral:
                raise ApiError(400, f"reasoning.{key}: only {neutral[1]!r} is served.", "reasoning")
        for key in _NO_SUMMARY:
            if given.get(key) not in _SUMMARIES:
                raise ApiError(400, f"reasoning.{key}: is auto, concise or detailed.", "reasoning")
            if given.get(key) is not None:
                self.ignored_fields.append(f"reasoning.{key}")  # what was reasoned is told in full
        return {} if given.get("effort") is None else {"reasoning_effort": given["effort"]}


def about_response(error: ApiError) -> ApiError:
    """An error about a field as a ChatRequest or the engine calls it as one about this route's."""
    name = _NAMES.get(error.param or "")
    if name is None:
        return error
    message = error.message
    if message.startswith(error.param or ""):
        message = name + message.removeprefix(error.param or "")
    return ApiError(error.status, message, name, error.code, error.headers)


def _chat_request(given: dict[str, Any]) -> Any:
    try:
        return untyped(ChatRequest.model_validate({**given, "messages": []}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, *place = [str(part) for part in first["loc"]]
        where = "".join(f".{part}" for part in place[:8])
        raise about_response(ApiError(400, f"{field}{where}: {first['msg']}.", field)) from None


def _function(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A function as answers repeat it."""
    name = tool.get("name")
    if not isinstance(name, str):
        raise ApiError(
            400, f'{where}.name: must be a text; a function is {{"type": "function", "name", "parameters"}} here.',
            "tools",
        )  # fmt: skip
    _check_keys(where, tool, ("type", *_FUNCTION_KEYS, *_NEUTRAL_KEYS))
    for key in _NEUTRAL_KEYS:
        if tool.get(key) not in _NEUTRAL:
            raise ApiError(400, f"{where}.{key}: is not served.", "tools", "unsupported_parameter")
    if tool.get("parameters") is not None and not isinstance(tool["parameters"], dict):
        raise ApiError(400, f"{where}.parameters: must be a JSON schema.", "tools")
    return {"type": "function", **{key: tool.get(key) for key in _FUNCTION_KEYS}}


def _without(tool: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != key and value is not None}


def _check_keys(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((key for key in given if key not in known and given[key] is not None), None)
    if unknown is not None:
        field = where.partition("[")[0]
        raise ApiError(400, f"{where}.{unknown[:80]}: there is no such field: take it out.", field)


def _check_metadata(given: dict[str, str] | None) -> None:
    for key, value in (given or {}).items():
        if len(given or {}) > _MAX_METADATA or len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise ApiError(
                400,
                f"metadata: has at most {_MAX_METADATA} entries, of {_MAX_KEY} characters and a text of {_MAX_VALUE}.",
                "metadata",
            )


def _check_stream_options(body: Any) -> None:
    """There is one thing to say, and it is not done."""
    options = body.stream_options or {}
    if options and not body.stream:
        raise ApiError(400, "stream_options: is for stream=true.", "stream_options")
    unknown = next((name for name in options if name != "include_obfuscation"), None)
    if unknown is not None:
        raise ApiError(400, f"stream_options: there is no {unknown[:80]!r}.", "stream_options")
    if options.get("include_obfuscation"):
        raise ApiError(400, "stream_options: include_obfuscation is not served.", "stream_options")
