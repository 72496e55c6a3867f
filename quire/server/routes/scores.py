"""POST /score and /rerank, and what else they are called: how well texts belong to one another."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from quire.lora import LoRARequest
from quire.platform.engine.similarity import comparison
from quire.platform.inputs.processor import PromptType
from quire.platform.pooling.params import PoolingParams
from quire.pooling_types import PoolingSpec, PoolingTask
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.responses.builder import adapter_of
from quire.server.responses.errors import Json, as_api_error
from quire.server.responses.pooled import PooledBody
from quire.server.routes.embeddings import PooledUsage
from quire.server.runners import pooling_of
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.openai import check_fields, untyped
from quire.server.schemas.pooling import (
    ACCEPTED,
    REFUSED,
    REFUSED_OF_DOCUMENTS,
    RerankRequest,
    ScoreRequest,
    sides,
    texts_of,
)
from quire.server.schemas.prompts import PromptReader, cache_salt

router = APIRouter(route_class=JsonRoute)

_Side = tuple[str, list[str]]  # what a client calls it, and its texts


class Scored(BaseModel):
    """A pair's score."""

    index: int
    object: str
    score: float


class ScoredList(BaseModel):
    """The score of each pair."""

    id: str
    object: str
    created: int
    model: str
    data: list[Scored]
    usage: PooledUsage


class Document(BaseModel):
    """A document, as it was sent."""

    text: str


class Ranked(BaseModel):
    """A document's place among those that were sent, and its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class RankedList(BaseModel):
    """Documents by their scores, the best first."""

    id: str
    created: int
    model: str
    results: list[Ranked]
    usage: PooledUsage
    meta: dict[str, Any]


@router.post("/score", responses={200: {"model": ScoredList}})
@router.post("/v1/score", responses={200: {"model": ScoredList}})
async def score(body: ScoreRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """How well each text of the second side belongs to that of the first at its place, or to the one that is there."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, check_fields(fields, REFUSED, context.config.unknown_fields == "warn", ACCEPTED))
    scores = _Scores(context, request, fields, "score")
    found = await scores.of(*sides(fields, context.config.max_texts))
    data = [{"index": place, "object": "score", "score": one} for place, one in enumerate(found)]
    return Json({**scores.answer.head(), "data": data, "usage": scores.answer.usage()})


@router.post("/rerank", responses={200: {"model": RankedList}})
@router.post("/v1/rerank", responses={200: {"model": RankedList}})
@router.post("/v2/rerank", responses={200: {"model": RankedList}})
async def rerank(body: RerankRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """Documents by how well they answer a query. Jina's routes show documents unasked, Cohere's /v2 does not."""
    context, fields = context_of(request), untyped(body)
    note_ignored(request, check_fields(fields, REFUSED_OF_DOCUMENTS, context.config.unknown_fields == "warn", ACCEPTED))
    texts = texts_of(fields.documents, context.config.max_texts)
    scores = _Scores(context, request, fields, "rerank")
    found = await scores.of(("query", [fields.query]), ("documents", texts))
    shown = fields.return_documents
    if shown is None:
        shown = getattr(request.scope.get("route"), "path", "") != "/v2/rerank"
    results = []
    for place in sorted(range(len(found)), key=lambda one: -found[one])[: fields.top_n or None]:
        told = {"document": {"text": texts[place]}} if shown else {}
        results.append({"index": place, "relevance_score": found[place], **told})
    usage = scores.answer.usage()
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}}
    return Json({**scores.answer.head(None), "results": results, "usage": usage, "meta": meta})


class _Scores:
    """Scores of pairs, by a cross-encoder, which reads both texts together, or by an embedder's vectors."""

    def __init__(self, context: ServerContext, request: Request, fields: Any, kind: str) -> None:
        """kind: of the answer's id."""
        self.answer = PooledBody(context, request, fields, kind)
        self._context = context
        self._request = request
        self._fields = fields

    async def of(self, first: _Side, second: _Side) -> list[float]:
        """As many as the second side has texts; the first has as many, or one. Raises ApiError."""
        context, fields = self._context, self._fields
        spec = pooling_of(context.engine.llm_engine.pooling, "score", "embed", "token_embed")
        adapter = await adapter_of(context, self._request, fields.model)
        note(self._request, model=context.served.name_of(fields.model), user=fields.user)
        try:
            if spec.is_cross_encoder:
                return await self._read_together(first, second, adapter)
            return await self._by_vectors(first, second, spec, adapter)
        except Exception as error:
            raise as_api_error(error, list(type(fields).model_fields)) from error

    def _params(self, task: PoolingTask) -> PoolingParams:
        fields = self._fields
        return PoolingParams(
            task=task,
            use_activation=fields.use_activation,
            truncate_prompt_tokens=fields.truncate_prompt_tokens,
        )

    async def _read_together(self, first: _Side, second: _Side, adapter: LoRARequest | None) -> list[float]:
        names = _names(second)
        reader, salt = PromptReader(self._context), cache_salt(self._fields.cache_salt)
        for side in (first, second):
            reader.check_texts(side[1], _names(side))
        queries = first[1] if len(first[1]) > 1 else first[1] * len(second[1])
        pairs: list[PromptType] = [{"prompt_pair": pair, **salt} for pair in zip(queries, second[1], strict=True)]
        outputs = await self.answer.run(pairs, self._params("score"), adapter, names)
        return [float(one.outputs.data.reshape(-1)[0]) for one in outputs]

    async def _by_vectors(
        self, first: _Side, second: _Side, spec: PoolingSpec, adapter: LoRARequest | None
    ) -> list[float]:
        names = [*_names(first), *_names(second)]
        texts = [*first[1], *second[1]]
        prompts = PromptReader(self._context).pooled_prompts(texts, names, cache_salt(self._fields.cache_salt))
        every = spec.has_many_rows  # the vectors of all tokens: late interaction
        outputs = await self.answer.run(prompts, self._params("token_embed" if every else "embed"), adapter, names)
        rows = [one.outputs.data for one in outputs]
        count, compare = len(first[1]), comparison(spec)
        return [compare(rows[place if count > 1 else 0], one) for place, one in enumerate(rows[count:])]


def _names(side: _Side) -> list[str]:
    """What a client calls each text of a side."""
    name, texts = side
    return [name] if name == "query" else [f"{name}[{place}]" for place in range(len(texts))]
