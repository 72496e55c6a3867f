"""From a body of /v1/messages to a call as /v1/chat/completions makes it, and on with that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from quire.platform.inputs.chat import template_of, template_variables
from quire.platform.inputs.processor import PromptType
from quire.server.context import ServerContext, note_ignored
from quire.server.responses.errors import ApiError
from quire.server.schemas.anthropic.conversation import Conversation
from quire.server.schemas.anthropic.fields import (
    ACCEPTED_IN_MESSAGES,
    EXTRAS,
    REFUSED_IN_MESSAGES,
    CountTokensRequest,
    MessagesRequest,
)
from quire.server.schemas.anthropic.typed import read
from quire.server.schemas.body import validated
from quire.server.schemas.chat_options import ChatCall, about_chat
from quire.server.schemas.fields import REFUSED_IN_CHAT
from quire.server.schemas.openai import ChatRequest, check_fields, untyped
from quire.server.schemas.sampling import Params

_SAME = ("max_tokens", "temperature", "top_p", "top_k", "model", "stream")
_CHOICES = {
    "auto": "ToolChoiceAutoParam", "any": "ToolChoiceAnyParam", "tool": "ToolChoiceToolParam",
    "none": "ToolChoiceNoneParam",
}  # fmt: skip
_THINKING = {
    "enabled": "ThinkingConfigEnabledParam", "disabled": "ThinkingConfigDisabledParam",
    "adaptive": "ThinkingConfigAdaptiveParam",
}  # fmt: skip
_SWITCHES = ("enable_thinking", "thinking")  # what templates call it
# What chat's fields are called here.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_LEADING = re.compile(r"[a-z_]+(?=[\[=.:' ])")
_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")


class MessagesBody:
    """A body of /v1/messages, or of its count_tokens, checked.

    fields: the body.  chat: the ChatRequest that says the same.  thinks: None where the body does not say.
    shows_thinking: whether the answer has the thinking's text.

    Raises ApiError, and RequestValidationError as the body's model does.
    """

    def __init__(self, fields: Any, lenient: bool) -> None:
        """lenient: what is not served is passed over."""
        self.fields = fields
        self.ignored = set(check_fields(fields, REFUSED_IN_MESSAGES, lenient, ACCEPTED_IN_MESSAGES))
        conversation = Conversation(fields)
        self.ignored |= conversation.ignored
        self._places = conversation.places
        self.thinks: bool | None = None
        self.shows_thinking = True
        given: dict[str, Any] = {name: getattr(fields, name, None) for name in (*_SAME, *EXTRAS)}
        given |= {"messages": conversation.messages, "stop": getattr(fields, "stop_sequences", None)}
        if conversation.goes_on:
            given |= {"continue_final_message": True, "add_generation_prompt": False}
        if getattr(fields, "metadata", None) is not None:
            given["user"] = read("MetadataParam", fields.metadata, "metadata").user_id
        given |= self._tools(fields) | self._thinking(fields)
        self.effort, form = self._output(fields)
        given["response_format"] = form
        wanted = {name: value for name, value in given.items() if value is not None}
        self.chat = untyped(validated(wanted, ChatRequest))
        try:
            check_fields(self.chat, REFUSED_IN_CHAT, lenient)
        except ApiError as error:
            raise self.about(error) from None

    def _tools(self, fields: Any) -> dict[str, Any]:
        """tools and tool_choice, as chat has them."""
        found: dict[str, Any] = {}
        if fields.tools:
            found["tools"] = [self._tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.tools)]
        if fields.tool_choice is None:
            return found
        kind = fields.tool_choice.get("type")
        if kind not in _CHOICES:
            raise ApiError(400, f"tool_choice.type: must be {', '.join(_CHOICES)}.", "tool_choice")
        choice = read(_CHOICES[kind], fields.tool_choice, "tool_choice")
        if kind not in ("none", "auto") and not fields.tools:
            raise ApiError(400, "tool_choice: there are no tools to choose from.", "tool_choice")
        named = {"type": "function", "function": {"name": getattr(choice, "name", None)}}
        found["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}.get(kind, named)
        if getattr(choice, "disable_parallel_tool_use", None) is not None and fields.tools:
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return found

    def _tool(self, where: str, given: Mapping[str, Any]) -> dict[str, Any]:
        kind = given.get("type")
        if kind not in (None, "custom"):
            raise ApiError(
                400, f"{where}: {str(kind)[:64]!r} is a tool of Anthropic's servers, and these are not here; tools "
                "that the client runs have a name and an input_schema.", "tools", "unsupported_parameter",
            )  # fmt: skip
        tool = read("ToolParam", given, where)
        callers = getattr(tool, "allowed_callers", None)
        if callers is not None and "direct" not in callers:
            raise ApiError(400, f"{where}.allowed_callers: no code runs here that could call it.", "tools")
        if getattr(tool, "defer_loading", None):
            raise ApiError(400, f"{where}.defer_loading: there is no search for tools here.", "tools")
        if getattr(tool, "input_examples", None):
            raise ApiError(400, f"{where}.input_examples: put them into the description.", "tools")
        if getattr(tool, "cache_control", None) is not None:
            self.ignored.add("tools[].cache_control")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        function["strict"] = getattr(tool, "strict", None)
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}

    def _thinking(self, fields: Any) -> dict[str, Any]:
        given = fields.thinking
        if given is None:
            return {}
        kind = given.get("type")
        if kind not in _THINKING:
            raise ApiError(400, f"thinking.type: must be {', '.join(_THINKING)}.", "thinking")
        thinking = read(_THINKING[kind], given, "thinking")
        self.thinks = kind != "disabled"
        self.shows_thinking = getattr(thinking, "display", None) != "omitted"
        return {"thinking_token_budget": thinking.budget_tokens} if kind == "enabled" else {}

    def _output(self, fields: Any) -> tuple[str | None, dict[str, Any] | None]:
        """(the effort, response_format as chat has it)"""
        config = fields.output_config and read("OutputConfigParam", fields.output_config, "output_config")
        form = config.format if config else None
        if fields.output_format is not None and form is not None:
            raise ApiError(400, "output_format: output_config.format is given too; give one of them.", "output_format")
        where = "output_config.format" if form is not None else "output_format"
        form = fields.output_format if form is None else form
        if form is None:
            return (config.effort if config else None), None
        whole = form.keys() == {"type", "schema"} and form["type"] == "json_schema"
        if not whole or not isinstance(form["schema"], dict):
            way_out = 'must be {"type": "json_schema", "schema": {...}}'
            raise ApiError(400, f"{where}: {way_out}.", where.partition(".")[0])
        schema = {"name": "answer", "schema": form["schema"], "strict": True}
        return (config.effort if config else None), {"type": "json_schema", "json_schema": schema}

    def about(self, error: ApiError) -> ApiError:
        """An error in the names of this body."""

        def place(found: re.Match[str]) -> str:
            index = int(found[1])
            return self._places[index] if index < len(self._places) else found[0]

        message = _MESSAGE.sub(place, error.message)
        message = re.sub(r"\b(tools\[\d+\])\.function\.parameters", r"\1.input_schema", message)
        message = re.sub(r"\b(tools\[\d+\])\.function", r"\1", message)
        message = _LEADING.sub(lambda found: _NAMES.get(found[0], found[0]), message, count=1)
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # by which its clients know it
        return ApiError(error.status, message, _NAMES.get(error.param or "", error.param), error.code, error.headers)


class MessagesCall(ChatCall):
    """What a body asks for. Whether the model thinks is known to the template by one of several names."""

    def __init__(self, context: ServerContext, request: Request, body: MessagesBody) -> None:
        super().__init__(context, request, body.chat)
        self._messages = body

    def read(self) -> list[tuple[PromptType, Params]]:
        """As ChatCall's. On a worker."""
        self.body.chat_template_kwargs = self._template_kwargs() or None
        return super().read()

    def _template_kwargs(self) -> dict[str, Any]:
        """The template's variables: thinking is off where nobody asks for it, as in Anthropic's API."""
        asked, kwargs = self._messages, dict(self.body.chat_template_kwargs or {})
        tokenizer = self._context.engine.llm_engine.tokenizer
        known = template_variables(template_of(tokenizer, self._context.config.chat_template, self.body.tools))
        switch = next((name for name in _SWITCHES if name in known), None)
        if switch is not None:
            if kwargs.setdefault(switch, bool(asked.thinks)) != asked.thinks and asked.thinks is not None:
                raise ApiError(
                    400, f"thinking: is not what chat_template_kwargs says of {switch}; give one of them.", "thinking"
                )
        elif asked.thinks and self.format.reasoning is None:
            note_ignored(self._request, ["thinking"])
        if asked.effort is not None and "reasoning_effort" in known:
            kwargs.setdefault("reasoning_effort", asked.effort)
        elif asked.effort is not None:
            note_ignored(self._request, ["output_config.effort"])
        return kwargs


def read_messages(given: Any, lenient: bool) -> MessagesBody:
    """A body of /v1/messages; raises as MessagesBody does."""
    return MessagesBody(untyped(validated(given, MessagesRequest)), lenient)


def read_count(given: Any, lenient: bool) -> MessagesBody:
    """A body of /v1/messages/count_tokens; raises as MessagesBody does."""
    return MessagesBody(untyped(validated(given, CountTokensRequest)), lenient)


def about_messages(error: ApiError, body: MessagesBody, call: ChatCall | None) -> ApiError:
    """An error that came from the way through chat, in the names of this route."""
    return body.about(about_chat(error, body.chat, call))
