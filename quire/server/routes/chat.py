"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types.chat import ChatCompletion

from quire.platform.outputs.messages.message import ArgumentsDelta, CallBegin, ContentDelta, Delta, ReasoningDelta
from quire.platform.outputs.outputs import CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.responses.builder import EventResponseBuilder, adapter_of
from quire.server.responses.errors import as_api_error
from quire.server.responses.logprobs import chat_logprobs, plain
from quire.server.responses.message_builder import Choice, ChoiceUpdate, MessageResponseBuilder
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.chat_options import ChatCall, about_chat, text_of_last
from quire.server.schemas.fields import REFUSED_IN_CHAT
from quire.server.schemas.openai import ChatRequest, check_fields, untyped

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}})
async def chat_completions(body: ChatRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Answer a conversation, pictures in it included."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, check_fields(fields, REFUSED_IN_CHAT, context.config.unknown_fields == "warn"))
    adapter = await adapter_of(context, request, fields.model)
    note(request, model=context.served.name_of(fields.model), user=fields.user or fields.safety_identifier)
    call: ChatCall | None = None
    try:
        call = ChatCall(context, request, fields)
        answer = _ChatAnswer(context, request, fields, call)
        return await answer.run(call.read, adapter, call.sequences, bool(fields.stream))
    except Exception as error:
        raise about_chat(as_api_error(error, list(type(fields).model_fields)), fields, call) from error


def _opening(body: Any, role: str) -> str:
    """What echo repeats: the last message, where it is of the role that goes on."""
    goes_on = body.echo and body.messages and body.messages[-1].get("role") == role
    return text_of_last(body.messages) if goes_on else ""


class _ChatAnswer(MessageResponseBuilder, EventResponseBuilder):
    kind = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, context: ServerContext, request: Request, body: Any, call: ChatCall) -> None:
        super().__init__(context, request, body, call)
        self._role = context.config.response_role
        self._opening = _opening(body, self._role)
        self._told = False  # of the prompt
        self._shows_reasoning = body.include_reasoning is not False
        self._repeats = not (body.logprobs or self._usage_each)
        self._patterns: dict[int, Callable[[str, Sequence[int]], bytes]] = {}

    # -- in one piece ---------------------------------------------------------------------------------------------

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        (output,) = outputs.values()
        choices = [self._whole_choice(choice, index) for index, choice in enumerate(self.choices(output))]
        note(self._request, **self._usage.for_log())
        return {**self._head, **self._of_prompt(output), "choices": choices, "usage": self._usage.as_dict()}

    def _of_prompt(self, output: Output) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and isinstance(output, RequestOutput):
            told["prompt_logprobs"] = plain(output.prompt_logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = list(output.prompt_token_ids)
        return told

    def _whole_choice(self, choice: Choice, index: int) -> dict[str, Any]:
        said = choice.message
        content = None if said.content is None and not self._opening else self._opening + (said.content or "")
        message: dict[str, Any] = {"role": self._role, "content": content, "refusal": None}
        if said.reasoning is not None and self._shows_reasoning:
            message.update(dict.fromkeys(_REASONING, said.reasoning))
        if said.tool_calls and self._call.legacy:
            message["function_call"] = _function(said.tool_calls[0].name, said.tool_calls[0].arguments)
        elif said.tool_calls:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": _function(one.name, one.arguments)}
                for one in said.tool_calls
            ]
        return {"index": index, "message": message, **self._rest(choice.completion, choice.finish_reason)}

    def _rest(self, completion: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        """What a choice has in both forms."""
        as_ids = bool(self._body.return_tokens_as_token_ids)
        rest: dict[str, Any] = {
            "logprobs": chat_logprobs(completion, self._body.top_logprobs or 0, as_ids)
            if self._body.logprobs
            else None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            rest["token_ids"] = list(completion.token_ids)
        return rest

    # -- streamed -------------------------------------------------------------------------------------------------

    def parts(self, output: RequestOutput) -> list[bytes]:
        """As `chunks`; what is nothing but more text, as nearly all is, without making JSON of it anew."""
        if not (self._told and self._repeats):
            return super().parts(output)
        made = []
        for update in self.updates(output):
            completion, shown, begins, _, ends = update
            if begins or ends or len(shown) != 1 or not isinstance(shown[0], ContentDelta):
                made += [self._event(self.chunk([choice], False)) for choice in self._choices(update)]
                continue
            if completion.index not in self._patterns:
                self._patterns[completion.index] = self._pattern(completion)
            made.append(self._patterns[completion.index](shown[0].text, completion.token_ids))
        return made

    def _pattern(self, completion: CompletionOutput) -> Callable[[str, Sequence[int]], bytes]:
        def choice(text: str, token_ids: list[Any]) -> dict[str, Any]:
            return self._text(replace(completion, token_ids=token_ids), text)

        return self.pattern(choice)

    def _text(self, completion: CompletionOutput, text: str) -> dict[str, Any]:
        return {"index": completion.index, "delta": {"content": text}, **self._rest(completion, None)}

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        told = {} if self._told else self._of_prompt(output)  # with the first chunk
        made = []
        for update in self.updates(output):
            for choice in self._choices(update):
                made.append({**self.chunk([choice], self._usage_each), **told})
                self._told, told = True, {}
        return made

    def _choices(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        """The chunks' choices that an update makes, mostly one. The first has the tokens, the last how it ended."""
        completion, shown, begins, _, ends = update
        if not self._shows_reasoning:
            shown = [delta for delta in shown if not isinstance(delta, ReasoningDelta)]
        if not (begins or ends):
            if not shown and not (completion.token_ids and (self._body.logprobs or self._body.return_token_ids)):
                return []
            if len(shown) == 1 and isinstance(shown[0], ContentDelta):  # as nearly all are
                return [self._text(completion, shown[0].text)]
        deltas, rest = self._deltas(update, shown), self._rest(completion, ends)
        if len(deltas) == 1:
            return [{"index": completion.index, "delta": deltas[0], **rest}]
        between = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        ended = {name: rest[name] for name in ("finish_reason", "stop_reason")}
        first = {**rest, "finish_reason": None, "stop_reason": None}
        rests = [first, *[between] * (len(deltas) - 2), {**between, **ended}]
        return [{"index": completion.index, "delta": delta, **one} for delta, one in zip(deltas, rests, strict=True)]

    def _deltas(self, update: ChoiceUpdate, shown: Sequence[Delta]) -> list[dict[str, Any]]:
        """As OpenAI has them: the role first; a call's name before its arguments, which are put together."""
        texts: dict[str, Any] = {}
        made = [texts]
        if update.begins:
            unknown = None if self._call.tools is not None and not self._opening else self._opening
            texts.update(role=self._role, content=unknown)
        for delta in shown:
            if isinstance(delta, ContentDelta):
                texts["content"] = (texts.get("content") or "") + delta.text
            elif isinstance(delta, ReasoningDelta):
                texts.update(dict.fromkeys(_REASONING, texts.get(_REASONING[0], "") + delta.text))
            else:
                made.append(self._call_delta(delta))
        ends_as_text = update.finish_reason is not None and not update.calls
        if ends_as_text or (self._call.tools is None and _REASONING[0] not in texts):
            texts["content"] = texts.get("content") or ""
        return made if texts or len(made) == 1 else made[1:]

    def _call_delta(self, delta: CallBegin | ArgumentsDelta) -> dict[str, Any]:
        function = _function(delta.name, "") if isinstance(delta, CallBegin) else {"arguments": delta.text}
        if self._call.legacy:
            return {"function_call": function}
        head = {"id": delta.id, "type": "function"} if isinstance(delta, CallBegin) else {}
        return {"tool_calls": [{"index": delta.place, **head, "function": function}]}


# Of a message: what clients of vLLM and of DeepSeek call what the model thought.
_REASONING = ("reasoning_content", "reasoning")


def _function(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}
