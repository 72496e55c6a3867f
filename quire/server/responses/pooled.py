"""From a body's prompts to what a model that pools makes of them: all of them, or the fault of one."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ContextLengthError, QuireError, RequestError
from quire.lora import LoRARequest
from quire.platform.engine.async_engine import EngineRequest
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.pooled import PoolingRequestOutput
from quire.platform.pooling.params import PoolingParams
from quire.server.context import ServerContext, new_id, note
from quire.server.responses.builder import unless_gone
from quire.server.responses.errors import ApiError, as_api_error, as_json

# A body of more prompts than may be in the engine at once comes to it in so many parts of that, one behind the other.
_LANES = 4
_OF_REQUEST = re.compile(r"request ([^ ]+): ")
_MANY = 1 << 15  # numbers whose text is made beside the event loop


class PooledBody:
    """One HTTP request's way through the engine.

    id: of the answer. body: its fields' names are what errors may be about.
    """

    def __init__(self, context: ServerContext, request: Request, body: Any, kind: str) -> None:
        self.id = new_id(kind, request, body.request_id)
        self._context = context
        self._request = request
        self._body = body
        self._fields = list(type(body).model_fields)
        self._names: dict[str, str] = {}  # by request: what the client calls its prompt
        self._prompt = self._cached = 0
        scheduler = context.engine.llm_engine.config.scheduler
        self._most = scheduler.max_num_seqs + min(context.config.max_queue, scheduler.max_num_seqs)

    async def run(
        self, prompts: Sequence[PromptType], params: PoolingParams, adapter: LoRARequest | None, names: Sequence[str]
    ) -> list[PoolingRequestOutput]:
        """What is made of each. names: what the client calls each. Raises ApiError, and nothing is left running."""
        engine = self._context.engine
        ids = engine.unique_ids(self.id, len(prompts))
        self._names = dict(zip(ids, names, strict=True))
        requests = [EngineRequest(one, prompt, params, adapter) for one, prompt in zip(ids, prompts, strict=True)]
        try:
            with engine.accepted(), self._context.admit(min(len(requests), self._most)):
                made = await unless_gone(self._request, self._all(requests))
        except Exception as error:
            raise self._told(error) from error
        outputs = [made[one] for one in ids]
        for output in outputs:
            self._prompt += len(output.prompt_token_ids)
            self._cached += output.num_cached_tokens or 0
        note(self._request, prompt_tokens=self._prompt, cached_tokens=self._cached)
        return outputs

    async def _all(self, requests: Sequence[EngineRequest]) -> dict[str, PoolingRequestOutput]:
        made: dict[str, PoolingRequestOutput] = {}
        if len(requests) <= self._most:
            await self._some(requests, made)
            return made
        size = -(-self._most // _LANES)
        parts = iter([requests[start : start + size] for start in range(0, len(requests), size)])

        async def lane() -> None:
            for part in parts:
                await self._some(part, made)

        lanes = [asyncio.ensure_future(lane()) for _ in range(_LANES)]
        try:
            await asyncio.gather(*lanes)
        finally:  # one has failed, or nobody waits any more: the others come to nothing with it
            for one in lanes:
                one.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        return made

    async def _some(self, requests: Sequence[EngineRequest], made: dict[str, PoolingRequestOutput]) -> None:
        outputs = await self._context.engine.submit(requests)
        try:
            async for output in outputs:
                made[output.request_id] = self._checked(output)
        finally:
            self._context.metrics.aborted(outputs.close())

    def _checked(self, output: PoolingRequestOutput) -> PoolingRequestOutput:
        failure, name = output.failure, self._names[output.request_id]
        if failure is not None and failure.by_caller:
            message = _OF_REQUEST.sub("", failure.message, count=1)
            raise ApiError(400, f"{name}: {message}", name.partition("[")[0], failure.code)
        if failure is not None:
            note(self._request, error=failure.message)
            raise ApiError(500, "the engine could not compute this request; the server's log has it under its id")
        if not np.isfinite(output.outputs.data.numpy()).all():
            raise ApiError(500, f"{name}: the model made of it what is no number (NaN, or infinite).")
        return output

    def _told(self, error: Exception) -> ApiError:
        """An error as the client can place it: a prompt has the name that it has in the body."""
        found = _OF_REQUEST.match(str(error)) if isinstance(error, RequestError) else None
        name = self._names.get(found[1]) if found is not None else None
        if found is None or name is None:
            return as_api_error(error, self._fields)
        field = name.partition("[")[0]
        if isinstance(error, ContextLengthError):
            return ApiError(400, str(error.about(name)), field, error.code)
        told = as_api_error(QuireError(str(error)[found.end() :]), self._fields)
        return told if told.param is not None else ApiError(told.status, f"{name}: {told.message}", field, told.code)

    def head(self, kind: str | None = "list") -> dict[str, Any]:
        """What an answer begins with. kind: of object."""
        named = {} if kind is None else {"object": kind}
        model = self._context.served.name_of(self._body.model)
        return {"id": self.id, **named, "created": int(time.time()), "model": model}

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts."""
        return {
            "prompt_tokens": self._prompt,
            "total_tokens": self._prompt,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    async def vectors(self, outputs: Sequence[PoolingRequestOutput], kind: str, name: str, encoding: str) -> Response:
        """An answer of vectors, or of rows of them, in the order of the prompts.

        kind: of object, of each; name: of its field. encoding: "base64": of the little-endian float32 numbers.
        """
        rows = [one.outputs.data.numpy() for one in outputs]
        text = _in_base64 if encoding == "base64" else _in_json
        many = sum(one.size for one in rows) > _MANY
        written = await self._context.engine.on_reader(_written, rows, text) if many else _written(rows, text)
        begin = b'{"object":"%b","index":' % kind.encode()
        data = b",".join(b'%b%d,"%b":%b}' % (begin, place, name.encode(), one) for place, one in enumerate(written))
        end = as_json(self.usage())
        content = b'%b,"data":[%b],"usage":%b}' % (as_json(self.head())[:-1], data, end)
        return Response(content, media_type="application/json")


def _written(rows: Sequence[Any], text: Any) -> list[bytes]:
    return [text(one) for one in rows]


def _in_json(row: Any) -> bytes:
    """Of float32, in the digits of float64: what reads them gets the same number."""
    return to_json(row.tolist())


def _in_base64(row: Any) -> bytes:
    return b'"%b"' % base64.b64encode(np.ascontiguousarray(row, "<f4").data)
