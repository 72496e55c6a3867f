"""POST /generate, as vLLM's first server has it, and GET /result/{request_id}, for who does not wait for the answer."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.outputs import BeamSearchOutput, Output, RequestOutput
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.deferred import owner_of
from quire.server.responses.builder import ResponseBuilder, adapter_of, best
from quire.server.responses.errors import ApiError, as_api_error
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.openai import GenerateRequest, untyped
from quire.server.schemas.prompts import PromptReader
from quire.server.schemas.sampling import Params, sampling_params
from quire.server.schemas.structured import about_shape, shape_of

router = APIRouter(route_class=JsonRoute)

_MAX_TOKENS = 16  # of vLLM's SamplingParams
_NOT_TOLD = ("logprobs", "prompt_logprobs")  # the answer has texts alone


class Texts(BaseModel):
    """Each answer with its prompt before it; or, with `wait` false, the name under which they are to be asked for."""

    text: list[str] | None = None
    request_id: str | None = None


class Pending(BaseModel):
    """The texts are not ready."""

    request_id: str
    status: str


@router.post("/generate", responses={200: {"model": Texts, "content": {"application/x-ndjson": {}}}})
async def generate(body: GenerateRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Continue a prompt. Streams are lines of JSON, each with the whole texts so far."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, [name for name in _NOT_TOLD if getattr(fields, name) is not None])
    fields = fields.model_copy(update=dict.fromkeys(_NOT_TOLD))
    adapter = await adapter_of(context, request, fields.model)
    note(request, model=context.served.name_of(fields.model), user=fields.user)
    wait = fields.wait is not False
    if fields.stream and not wait:
        raise ApiError(400, "stream: who does not wait gets the answer in one piece, from /result.", "stream")
    shape = shape_of(fields)
    try:
        max_tokens = fields.max_tokens
        if max_tokens is None and "max_tokens" not in context.config.default_sampling:
            max_tokens = _MAX_TOKENS
        params = sampling_params(fields, context.config, None, max_tokens, shape)
        answer = _TextsAnswer(context, request, fields, prompts=1)
        sequences = fields.best_of or fields.n or 1

        def read() -> list[tuple[PromptType, Params]]:
            reader = PromptReader(context)
            return [(one, params) for one in reader.completion_prompts([fields.prompt], fields, max_tokens)]

        if wait:
            return await answer.run(read, adapter, sequences, bool(fields.stream))
        context.deferred.check_room()
        rest = await answer.begin(read, adapter, sequences)
        name = context.deferred.add(rest(), owner_of(request.scope, context.config), context.id_prefix)
        note(request, result=name[:8])
        return JSONResponse({"request_id": name})
    except Exception as error:
        told = as_api_error(error, list(type(fields).model_fields))
        raise about_shape(told, shape.field if shape else None) from error


_NOT_YET = {"model": Pending, "description": "It is not ready."}


@router.get("/result/{request_id}", responses={200: {"model": Texts}, 202: _NOT_YET})
async def result(request_id: str, request: Request) -> Response:
    """The answer to a request that was not waited for: 202 until it is ready, 404 once it is forgotten."""
    context = context_of(request)
    kept = context.deferred.find(request_id, owner_of(request.scope, context.config))
    if kept is None:
        raise ApiError(404, "request_id: there is no such result, or it has been forgotten.", "request_id")
    if kept.error is not None:
        raise kept.error.again()
    if kept.body is None:
        return JSONResponse({"request_id": request_id, "status": "pending"}, 202, {"Retry-After": "1"})
    return Response(kept.body, media_type="application/json")


class _TextsAnswer(ResponseBuilder):
    kind = "gen"
    media_type = "application/x-ndjson"
    cumulative = True

    def __init__(self, context: ServerContext, request: Request, body: Any, prompts: int) -> None:
        super().__init__(context, request, body, prompts)
        self._texts: list[bytearray] = []  # of a stream so far, as JSON has them

    def prompt_text(self, output: Output) -> str:
        given = self._body.prompt
        return given if isinstance(given, str) else super().prompt_text(output)

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        (output,) = outputs.values()
        self._usage.count(output)
        note(self._request, **self._usage.for_log())
        chosen = self.beams(output) if isinstance(output, BeamSearchOutput) else best(output.outputs, self._n)
        prompt = self.prompt_text(output)
        return {"text": [prompt + completion.text for completion in chosen]}

    def parts(self, output: RequestOutput) -> list[bytes]:
        """One line, put together of what has been escaped before: a long text is not written anew for each token."""
        self._usage.count(output)
        for completion in output.outputs:
            if completion.index == len(self._texts):
                self._texts.append(bytearray(_escaped(self.prompt_text(output))))
            self._texts[completion.index] += _escaped(completion.text)
        return [b'{"text":["' + b'","'.join(self._texts) + b'"]}\n']

    def last_parts(self) -> list[bytes]:
        note(self._request, **self._usage.for_log())
        return []

    def failed(self, error: ApiError) -> list[bytes]:
        return [json.dumps(error.body).encode() + b"\n"]


def _escaped(text: str) -> bytes:
    """Between quotes of JSON."""
    return json.dumps(text).encode()[1:-1]
