"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import Completion

from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, Output, RequestOutput
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.responses.builder import EventResponseBuilder, adapter_of, best
from quire.server.responses.errors import as_api_error
from quire.server.responses.logprobs import CompletionLogprobs, joined, plain
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.fields import REFUSED_IN_COMPLETIONS
from quire.server.schemas.openai import CompletionRequest, check_fields, untyped
from quire.server.schemas.prompts import PromptReader, completion_prompts
from quire.server.schemas.sampling import Params, sampling_params
from quire.server.schemas.structured import about_shape, shape_of

router = APIRouter(route_class=JsonRoute)

_MAX_TOKENS = 16  # OpenAI's default


@router.post("/v1/completions", responses={200: {"model": Completion, "content": {"text/event-stream": {}}}})
async def completions(body: CompletionRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Continue one prompt or several."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, check_fields(fields, REFUSED_IN_COMPLETIONS, context.config.unknown_fields == "warn"))
    adapter = await adapter_of(context, request, fields.model)
    note(request, model=context.served.name_of(fields.model), user=fields.user or fields.safety_identifier)
    shape = shape_of(fields)
    try:
        scores_only = fields.max_tokens == 0 and bool(fields.echo)
        max_tokens = 1 if scores_only else fields.max_tokens
        if max_tokens is None and "max_tokens" not in context.config.default_sampling:
            max_tokens = _MAX_TOKENS
        params = sampling_params(fields, context.config, fields.logprobs, max_tokens, shape)
        prompts = completion_prompts(fields, context.config.max_prompts)
        answer = _CompletionAnswer(context, request, fields, len(prompts), scores_only)
        sequences = len(prompts) * (fields.best_of or fields.n or 1)

        def read() -> list[tuple[PromptType, Params]]:
            return [(one, params) for one in PromptReader(context).completion_prompts(prompts, fields, max_tokens)]

        return await answer.run(read, adapter, sequences, bool(fields.stream))
    except Exception as error:
        told = as_api_error(error, list(type(fields).model_fields))
        raise about_shape(told, shape.field if shape else None) from error


class _Choice:
    """What has been sent of one choice."""

    def __init__(self, logprobs: CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.begun = False
        self.ended = False
        self.event: Callable[[str, Sequence[int]], bytes] | None = None  # of what is nothing but more text


class _CompletionAnswer(EventResponseBuilder):
    """scores_only: max_tokens=0 with echo, which asks for the prompt and its logprobs alone."""

    kind = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, context: ServerContext, request: Request, body: Any, prompts: int, scores_only: bool) -> None:
        super().__init__(context, request, body, prompts)
        self._place = {request_id: place for place, request_id in enumerate(self._ids)}
        self._scores_only = scores_only
        self._choices: dict[int, _Choice] = {}
        self._repeats = body.logprobs is None and not (scores_only or self._usage_each)

    # -- in one piece ---------------------------------------------------------------------------------------------

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for request_id, place in self._place.items():
            output = outputs[request_id]
            self._count(output)
            if isinstance(output, BeamSearchOutput):
                choices += [self._beam(output, beam, place * self._n) for beam in self.beams(output)]
                continue
            for index, completion in enumerate(best(output.outputs, self._n), place * self._n):
                choices.append(self._choice(output, completion, index, _Choice(self._new_logprobs())))
        note(self._request, **self._usage.for_log())
        return {**self._head, "choices": choices, "usage": self._usage.as_dict()}

    def _count(self, output: Output) -> None:
        self._usage.count(output)
        if self._scores_only:
            self._usage.completion = 0

    def _new_logprobs(self) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobs(self._body.logprobs, bool(self._body.return_tokens_as_token_ids))

    def _choice(self, output: RequestOutput, completion: CompletionOutput, index: int, sent: _Choice) -> dict[str, Any]:
        """A choice, or what is new of it; the first time with the prompt, if that is to be echoed."""
        text = "" if self._scores_only else completion.text
        finish = completion.finish_reason
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._scores_only and finish else finish,
            "stop_reason": None if self._scores_only else completion.stop_reason,
        }
        parts = []
        if not sent.begun:
            if self._body.echo:
                choice["text"] = self.prompt_text(output) + text
                if sent.logprobs is not None and output.prompt_logprobs is not None:
                    parts += self._prompt_logprobs(output, sent.logprobs)
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = plain(output.prompt_logprobs)
        if sent.logprobs is not None and completion.logprobs is not None and not self._scores_only:
            parts.append(sent.logprobs.of(completion.token_ids, completion.logprobs))
        if parts:
            choice["logprobs"] = joined(parts)
        if self._body.return_token_ids:
            choice["token_ids"] = [] if self._scores_only else list(completion.token_ids)
        sent.begun = True
        return choice

    def _prompt_logprobs(self, output: RequestOutput, logprobs: CompletionLogprobs) -> list[dict[str, Any]]:
        assert output.prompt_logprobs is not None
        first = output.prompt_token_ids[0]
        head = logprobs.first(str(self._tokenizer.decode([first])), first, self.prompt_text(output))
        rest = [entries for entries in output.prompt_logprobs[1:] if entries is not None]
        return [head, logprobs.of(output.prompt_token_ids[1:], rest)]

    def _beam(self, output: BeamSearchOutput, completion: CompletionOutput, first: int) -> dict[str, Any]:
        choice = {
            "index": first + completion.index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice |= {
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": list(completion.token_ids),
            }
        return choice

    # -- streamed -------------------------------------------------------------------------------------------------

    def parts(self, output: RequestOutput) -> list[bytes]:
        """As `chunks`; what is nothing but more text, as nearly all is, without making JSON of it anew."""
        if len(output.outputs) == 1 and self._repeats:
            completion = output.outputs[0]
            sent = self._choices.get(self._place[output.request_id] * self._n + completion.index)
            if sent is not None and not sent.ended and completion.finish_reason is None:
                self._count(output)
                if not completion.text and not (self._body.return_token_ids and completion.token_ids):
                    return []
                if sent.event is None:
                    sent.event = self._pattern(output, completion, sent)
                return [sent.event(completion.text, completion.token_ids)]
        return super().parts(output)

    def _pattern(
        self, output: RequestOutput, completion: CompletionOutput, sent: _Choice
    ) -> Callable[[str, Sequence[int]], bytes]:
        index = self._place[output.request_id] * self._n + completion.index

        def choice(text: str, token_ids: list[Any]) -> dict[str, Any]:
            return self._choice(output, replace(completion, text=text, token_ids=token_ids), index, sent)

        return self.pattern(choice)

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        self._count(output)
        place = self._place[output.request_id]
        made = []
        for completion in output.outputs:
            index = place * self._n + completion.index
            sent = self._choices.get(index)
            first = sent is None
            if sent is None:
                sent = self._choices[index] = _Choice(self._new_logprobs())
            if sent.ended:
                continue
            choice = self._choice(output, completion, index, sent)
            sent.ended = completion.finish_reason is not None
            if first or sent.ended or choice["text"] or choice["logprobs"] or choice.get("token_ids"):
                made.append(self.chunk([choice], self._usage_each))
        return made
