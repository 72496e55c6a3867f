"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types.chat import ChatCompletion

from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.responses.builder import EventResponseBuilder, GenerationOptions, adapter_of, best
from quire.server.responses.errors import ApiError, as_api_error
from quire.server.responses.logprobs import chat_logprobs, plain
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.fields import REFUSED_IN_CHAT
from quire.server.schemas.openai import ChatRequest, check_fields, untyped
from quire.server.schemas.prompts import PromptReader
from quire.server.schemas.sampling import sampling_params

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "content": {"text/event-stream": {}}}})
async def chat_completions(body: ChatRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Answer a conversation, pictures in it included."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, check_fields(fields, REFUSED_IN_CHAT, context.config.unknown_fields == "warn"))
    adapter = await adapter_of(context, request, fields.model)
    name = context.served.name_of(fields.model)
    note(request, model=name, user=fields.user or fields.safety_identifier)
    try:
        max_tokens = _max_tokens(fields)
        params = sampling_params(fields, context.config, _logprobs(fields), max_tokens)
        answer = _ChatAnswer(context, request, fields, name)
        sequences = fields.best_of or fields.n or 1

        def prompts() -> list[PromptType]:
            reader = PromptReader(context)
            try:
                return [reader.chat_prompt(fields, max_tokens)]
            finally:
                note_ignored(request, reader.ignored_fields)

        return await answer.run(prompts, GenerationOptions(params, adapter), sequences, bool(fields.stream))
    except Exception as error:
        raise _by_name(as_api_error(error, list(type(fields).model_fields)), fields) from error


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


def _by_name(error: ApiError, body: Any) -> ApiError:
    """The engine's names for two fields are others than this route's."""
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    given = names.get(error.param or "")
    if given is None or not error.message.startswith(f"{error.param}="):
        return error
    return ApiError(error.status, given + error.message.removeprefix(error.param or ""), given, error.code)


def _opening(body: Any, role: str) -> str:
    """What echo repeats: the last message, where it is of the role that goes on. Nobody has checked messages yet."""
    last = body.messages[-1] if body.echo and body.messages else {}
    content = last.get("content") if last.get("role") == role else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


class _ChatAnswer(EventResponseBuilder):
    kind = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, context: ServerContext, request: Request, body: Any, model: str) -> None:
        super().__init__(context, request, body, model, prompts=1)
        self._role = context.config.response_role
        self._opening = _opening(body, self._role)
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    # -- in one piece ---------------------------------------------------------------------------------------------

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        (output,) = outputs.values()
        self._usage.count(output)
        chosen = self.beams(output) if isinstance(output, BeamSearchOutput) else best(output.outputs, self._n)
        choices = [self._choice(completion, index) for index, completion in enumerate(chosen)]
        note(self._request, **self._usage.for_log())
        return {**self._head, **self._of_prompt(output), "choices": choices, "usage": self._usage.as_dict()}

    def _of_prompt(self, output: Output) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and isinstance(output, RequestOutput):
            told["prompt_logprobs"] = plain(output.prompt_logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = list(output.prompt_token_ids)
        return told

    def _choice(self, completion: CompletionOutput, index: int) -> dict[str, Any]:
        content = self._opening + completion.text
        return {
            "index": index,
            "message": {"role": self._role, "content": content, "refusal": None},
            **self._rest(completion),
        }

    def _rest(self, completion: CompletionOutput) -> dict[str, Any]:
        """What a choice has in both forms."""
        as_ids = bool(self._body.return_tokens_as_token_ids)
        rest: dict[str, Any] = {
            "logprobs": chat_logprobs(completion, self._body.top_logprobs or 0, as_ids)
            if self._body.logprobs
            else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            rest["token_ids"] = list(completion.token_ids)
        return rest

    # -- streamed -------------------------------------------------------------------------------------------------

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        self._usage.count(output)
        told = {} if self._begun else self._of_prompt(output)  # with the first chunk
        made = []
        for completion in output.outputs:
            if self._has_news(completion):
                made.append({**self.chunk([self._delta(completion)], self._usage_each), **told})
                told = {}
        return made

    def _has_news(self, completion: CompletionOutput) -> bool:
        if completion.index in self._ended:
            return False
        tells_tokens = completion.token_ids and (self._body.logprobs or self._body.return_token_ids)
        begins = completion.index not in self._begun
        return bool(begins or completion.text or completion.finish_reason or tells_tokens)

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": completion.text}
        if completion.index not in self._begun:
            self._begun.add(completion.index)
            delta = {"role": self._role, "content": self._opening + completion.text}
        if completion.finish_reason is not None:
            self._ended.add(completion.index)
        return {"index": completion.index, "delta": delta, **self._rest(completion)}
