"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import Completion

from quire import __version__
from quire.platform.async_engine import Output
from quire.platform.beam import BeamSearchOutput
from quire.platform.outputs import CompletionOutput, RequestOutput
from quire.server.api.answers import Answer, Usage, Wanted, best
from quire.server.api.body import JsonRoute
from quire.server.api.context import Context, context_of, new_id, note
from quire.server.api.errors import as_api_error
from quire.server.api.fields import REFUSED_IN_COMPLETIONS
from quire.server.api.logprobs import CompletionLogprobs, joined, plain
from quire.server.api.prompts import Reader, several
from quire.server.api.sampling import sampling_params, stream_options
from quire.server.api.schemas import CompletionRequest, check_refused, untyped

router = APIRouter(route_class=JsonRoute)

_MAX_TOKENS = 16  # OpenAI's default


@router.post("/v1/completions", responses={200: {"model": Completion, "content": {"text/event-stream": {}}}})
async def completions(body: CompletionRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Continue one prompt or several."""
    context, asked = context_of(request), untyped(body)
    check_refused(asked, REFUSED_IN_COMPLETIONS)
    adapter = context.served.find(asked.model)
    name = context.served.name_of(asked.model)
    note(request, model=name, user=asked.user)
    try:
        scores_only = asked.max_tokens == 0 and bool(asked.echo)
        max_tokens = 1 if scores_only else asked.max_tokens
        if max_tokens is None and "max_tokens" not in context.config.default_sampling:
            max_tokens = _MAX_TOKENS
        params = sampling_params(asked, context.config, asked.logprobs, max_tokens)
        prompts = several(asked.prompt, context.config.max_prompts)
        answer = _CompletionAnswer(context, request, asked, name, len(prompts), scores_only)
        sequences = len(prompts) * (asked.best_of or asked.n or 1)
        return await answer.run(
            lambda: Reader(context).completion_prompts(prompts, asked, max_tokens),
            Wanted(params, adapter),
            sequences,
            bool(asked.stream),
        )
    except Exception as error:
        raise as_api_error(error, list(type(asked).model_fields)) from error


class _Choice:
    """What has been sent of one choice."""

    def __init__(self, logprobs: CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.begun = False
        self.ended = False


class _CompletionAnswer(Answer):
    """scores_only: max_tokens=0 with echo, which asks for the prompt and its logprobs alone."""

    def __init__(
        self,
        context: Context,
        request: Request,
        body: Any,
        model: str,
        prompts: int,
        scores_only: bool,
    ) -> None:
        answer_id = new_id("cmpl", request, body.request_id)
        ids = context.engine.unique_ids(answer_id, prompts)
        super().__init__(context, request, ids, list(type(body).model_fields))
        self._tokenizer = context.engine.core.tokenizer
        self._body = body
        self._n = body.n or 1
        self._place = {request_id: place for place, request_id in enumerate(ids)}
        self._scores_only = scores_only
        self._usage_last, self._usage_each = stream_options(body)
        self._usage = Usage()
        self._choices: dict[int, _Choice] = {}
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"quire-{__version__}",
        }

    # -- in one piece ---------------------------------------------------------------------------------------------

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for request_id, place in self._place.items():
            output = outputs[request_id]
            self._count(output)
            if isinstance(output, BeamSearchOutput):
                choices += self._beams(output, place * self._n)
                continue
            for index, completion in enumerate(best(output.outputs, self._n), place * self._n):
                choices.append(self._choice(output, completion, index, _Choice(self._new_logprobs())))
        self._finish()
        return {**self._head, "choices": choices, "usage": self._usage.as_dict()}

    def _count(self, output: Output) -> None:
        self._usage.count(output)
        if self._scores_only:
            self._usage.completion = 0

    def _finish(self) -> None:
        note(self._request, **self._usage.for_log())

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
                choice["text"] = self._prompt_text(output) + text
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

    def _prompt_text(self, output: RequestOutput | BeamSearchOutput) -> str:
        text = output.prompt if isinstance(output, RequestOutput) else None
        return text if text is not None else str(self._tokenizer.decode(list(output.prompt_token_ids)))

    def _prompt_logprobs(self, output: RequestOutput, logprobs: CompletionLogprobs) -> list[dict[str, Any]]:
        assert output.prompt_logprobs is not None
        first = output.prompt_token_ids[0]
        head = logprobs.first(str(self._tokenizer.decode([first])), first, self._prompt_text(output))
        rest = [entries for entries in output.prompt_logprobs[1:] if entries is not None]
        return [head, logprobs.of(output.prompt_token_ids[1:], rest)]

    def _beams(self, output: BeamSearchOutput, first: int) -> list[dict[str, Any]]:
        prompt = len(output.prompt_token_ids)
        choices = []
        for index, beam in enumerate(output.sequences, first):
            new = beam.tokens[prompt:]
            choice = {
                "index": index,
                "text": self._tokenizer.decode(new, skip_special_tokens=True),
                "logprobs": None,
                "finish_reason": beam.finish_reason,
                "stop_reason": beam.stop_reason,
            }
            if self._body.return_token_ids:
                choice |= {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": list(new)}
            choices.append(choice)
        return choices

    # -- streamed -------------------------------------------------------------------------------------------------

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
                made.append(self._chunk([choice], self._usage_each))
        return made

    def _chunk(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        if not (self._usage_last or self._usage_each):
            return {**self._head, "choices": choices}
        return {**self._head, "choices": choices, "usage": self._usage.as_dict() if with_usage else None}

    def last_chunks(self) -> list[dict[str, Any]]:
        self._finish()
        return [self._chunk([], True)] if self._usage_last else []
