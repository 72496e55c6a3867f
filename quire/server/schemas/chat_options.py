"""From a body of /v1/chat/completions to what the engine is asked, and how its answers are to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from quire.errors import RequestError
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.messages.constrained import constrained
from quire.platform.outputs.messages.message import ContentDelta, Delta, MessageParser
from quire.platform.outputs.messages.tool_choice import CALLS_ALONE, Tools, check_functions, check_tools
from quire.platform.sampling.params import BeamSearchParams
from quire.server.context import ServerContext, note_ignored
from quire.server.responses.errors import ApiError
from quire.server.schemas.prompts import MAX_EXTRA, PromptReader, check_size
from quire.server.schemas.sampling import Params, sampling_params
from quire.server.schemas.structured import about_shape, shape_of

# OpenAI's and Anthropic's own fields say how content is formatted: of an answer that is calls alone, nothing. Clients
# that always send them expect that.
_CONTENT_FORMATS = frozenset({"response_format", "text.format", "output_config.format", "output_format"})


class ChatCall:
    """What a body asks for. A route whose bodies are others makes such a one of them (`ChatRequest.model_validate`).

    body: a ChatRequest.  sequences: that are generated.  tools: those of the request, None without any.
    legacy: the tools came as `functions`.  format: how the model writes messages.

    Raises ApiError and RequestError for what cannot be served.
    """

    def __init__(self, context: ServerContext, request: Request, body: Any) -> None:
        self.body = body
        self.sequences: int = body.best_of or body.n or 1
        self._context = context
        self._request = request
        self._max_tokens = _max_tokens(body)
        self.tools, self.legacy = _tools_of(body)
        self._shape = shape_of(body)
        if self._shape is not None and self.tools is not None and self.tools.forced:
            field = self._shape.field
            if field not in _CONTENT_FORMATS:
                choice = "function_call" if self.legacy else "tool_choice"
                raise ApiError(400, f"{field}: {choice} {CALLS_ALONE}", field)
            self._shape = None
        self._params = sampling_params(body, context.config, _logprobs(body), self._max_tokens, self._shape)
        self._bound_reasoning()
        self._begins_in_reasoning: bool | None = None
        self.format = replace(context.format, tools=None) if self.tools is None else context.format
        if self.tools is None and body.parallel_tool_calls is not None:
            note_ignored(request, ["parallel_tool_calls"])

    def _bound_reasoning(self) -> None:
        """Where the model does not reason there is nothing to bound."""
        budget = self.body.thinking_token_budget
        if budget is None or isinstance(self._params, BeamSearchParams):
            return
        self._params = replace(self._params, thinking_token_budget=budget)
        if self._context.format.reasoning is None:
            note_ignored(self._request, ["thinking_token_budget"])
            self._params = replace(self._params, thinking_token_budget=None)

    def read(self) -> list[tuple[PromptType, Params]]:
        """The prompt, and what it is to be answered with. On a worker: it renders and tokenizes."""
        reader = PromptReader(self._context)
        try:
            prompt, text = reader.chat_prompt(self.body, self._max_tokens, self._shown_tools(reader))
        finally:
            note_ignored(self._request, reader.ignored_fields)
        self._begins_in_reasoning = self.format.begins_in_reasoning(text, _continued(self.body))
        return [(prompt, self._constrained(self._params))]

    def _shown_tools(self, reader: PromptReader) -> list[dict[str, Any]] | None:
        """Those that the template is told of."""
        tools = self.tools
        if tools is None:
            return None
        if tools.choice == "none" and self._context.config.exclude_tools_when_tool_choice_none:
            return None
        shown = tools.as_tools()
        if reader.shows_tools(shown):
            return shown
        if tools.choice == "auto":
            raise ApiError(
                400,
                f"{self._tools_field}: this model's chat template has no place for tools, so that the model would not "
                "know them; start the server with a --chat-template that has one, or have one called: tool_choice.",
                self._tools_field,
            )
        note_ignored(self._request, [self._tools_field])
        return None

    def _constrained(self, params: Params) -> Params:
        """The parameters with what tokens must follow, and with the texts that the parser has to see."""
        strict = self._context.config.tool_strict
        try:
            params = constrained(params, self.format, self.tools, self._begins_in_reasoning, strict)
        except RequestError as error:
            if self.tools is None:
                raise
            raise ApiError(400, str(error), self._tools_field) from error
        if isinstance(params, BeamSearchParams) or not self.format.needs_special_tokens:
            return params
        return replace(params, skip_special_tokens=False)

    @property
    def shape_field(self) -> str | None:
        """The request's field that says what the answers are to look like."""
        if self._shape is not None:
            return self._shape.field
        return None if self.tools is None else self._tools_field

    @property
    def _tools_field(self) -> str:
        return "functions" if self.legacy else "tools"

    def parser(self, request_id: str, index: int) -> MessageParser:
        """Reads one choice's text; after `read`. request_id, index: that calls' ids are made of."""
        if self.tools is None and self.format.reasoning is None:
            return _PlainParser()
        return self.format.parser(
            self.tools,
            self._begins_in_reasoning,
            request_id=request_id,
            choice=index,
            keep_special_tokens=self.body.skip_special_tokens is False,
        )


class _PlainParser:
    """All is content, as the answers of most models are: a token in a stream costs nothing more."""

    def feed(self, text: str) -> list[Delta]:
        """As MessageParser has it."""
        return [ContentDelta(text)] if text else []

    def finish(self, cut: bool = False) -> list[Delta]:
        """As MessageParser has it."""
        return []


def _tools_of(body: Any) -> tuple[Tools | None, bool]:
    """The tools, and whether they came as `functions`."""
    for field in ("tools", "functions"):
        check_size([getattr(body, field)], 0, MAX_EXTRA, field)  # all together, before each is looked at
    if body.functions is None and body.function_call is None:
        return check_tools(body.tools, body.tool_choice, body.parallel_tool_calls), False
    if body.tools:
        raise ApiError(400, "functions: tools are given too, which took their place; give one of them.", "functions")
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice: is for tools; function_call is for functions.", "tool_choice")
    return check_functions(body.functions, body.function_call), True


def _continued(body: Any) -> str:
    """The text that the answer goes on with, if it does."""
    return text_of_last(body.messages) if body.continue_final_message else ""


def text_of_last(messages: Any) -> str:
    """Of a conversation's last message: its texts. Nobody need have checked messages yet."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def about_chat(error: ApiError, body: Any, call: ChatCall | None = None) -> ApiError:
    """The error by the names of a ChatRequest: the engine's names for some fields are others."""
    if call is not None:
        error = about_shape(error, call.shape_field)
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    given = names.get(error.param or "")
    if given is None or not error.message.startswith(f"{error.param}="):
        return error
    return ApiError(error.status, given + error.message.removeprefix(error.param or ""), given, error.code)


def _logprobs(body: Any) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: is for logprobs=true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: Any) -> int | None:
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens: is not max_completion_tokens; give one of them.", "max_tokens")
    most: int | None = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return most
