"""POST /v1/embeddings, /pooling and /classify: what a model makes of each prompt of a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from openai.types import CreateEmbeddingResponse
from pydantic import BaseModel

from quire.platform.inputs.processor import PromptType
from quire.platform.pooling.params import PoolingParams
from quire.pooling_types import PoolingSpec, PoolingTask
from quire.server.context import ServerContext, context_of, note, note_ignored
from quire.server.responses.builder import adapter_of, unless_gone
from quire.server.responses.errors import ApiError, Json, as_api_error
from quire.server.responses.pooled import PooledBody
from quire.server.runners import pooling_of
from quire.server.schemas.body import JsonRoute
from quire.server.schemas.fields import Refusal
from quire.server.schemas.openai import check_fields, untyped
from quire.server.schemas.pooling import (
    ACCEPTED,
    REFUSED_OF_CLASSES,
    REFUSED_OF_VECTORS,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    inputs,
)
from quire.server.schemas.prompts import PromptReader, cache_salt

router = APIRouter(route_class=JsonRoute)

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs")


class PooledUsage(BaseModel):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Pooled(BaseModel):
    """Numbers, or rows of numbers, or base64 of these."""

    object: str
    index: int
    data: list[float] | list[list[float]] | str


class PooledList(BaseModel):
    """What was made of each prompt."""

    id: str
    object: str
    created: int
    model: str
    data: list[Pooled]
    usage: PooledUsage


class Classified(BaseModel):
    """A prompt's classes. label: the likeliest one's name."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifiedList(BaseModel):
    """The classes of each prompt."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classified]
    usage: PooledUsage


@router.post("/v1/embeddings", responses={200: {"model": CreateEmbeddingResponse}})
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """A vector of each text, of each list of token ids, or of messages."""
    context, fields = context_of(request), untyped(body)
    spec = pooling_of(context.engine.llm_engine.pooling, "embed", "token_embed")
    if spec.has_many_rows:
        raise ApiError(400, "this model keeps the vectors of all tokens: call /pooling, or /score and /rerank.")
    answer, outputs = await _made(context, request, fields, "embd", "embed", REFUSED_OF_VECTORS)
    return await answer.vectors(outputs, "embedding", "embedding", fields.encoding_format or "float")


@router.post("/pooling", responses={200: {"model": PooledList}})
async def pooling(body: PoolingRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """What a task makes of each prompt: one row, or one for each token."""
    context, fields = context_of(request), untyped(body)
    spec = pooling_of(context.engine.llm_engine.pooling)
    task = fields.task or spec.tasks[0]
    if task not in spec.tasks:
        raise ApiError(400, f"task: {task!r} is none of this model's: {', '.join(spec.tasks)}.", "task")
    answer, outputs = await _made(context, request, fields, "pool", task, REFUSED_OF_VECTORS)
    return await answer.vectors(outputs, "pooling", "data", fields.encoding_format or "float")


@router.post("/classify", responses={200: {"model": ClassifiedList}})
async def classify(body: ClassifyRequest, request: Request) -> Response:  # type: ignore[valid-type]
    """The classes' probabilities of each prompt."""
    context, fields = context_of(request), untyped(body)
    spec = pooling_of(context.engine.llm_engine.pooling, "classify")
    answer, outputs = await _made(context, request, fields, "classify", "classify", REFUSED_OF_CLASSES)
    labels = _labels(spec)
    data = []
    for place, output in enumerate(outputs):
        probs = output.outputs.data.numpy().reshape(-1)
        label = labels[int(np.argmax(probs))] if len(labels) == len(probs) else None
        data.append({"index": place, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return Json({**answer.head(), "data": data, "usage": answer.usage()})


def _labels(spec: PoolingSpec) -> list[str]:
    return [spec.labels[one] for one in spec.labels_returned or range(len(spec.labels))]


async def _made(
    context: ServerContext,
    request: Request,
    fields: Any,
    kind: str,
    task: PoolingTask,
    refused: Mapping[str, Refusal],
) -> tuple[PooledBody, list[Any]]:
    """(the answer that is to be written, the outputs in the order of the prompts). kind: of the answer's id."""
    note_ignored(request, check_fields(fields, refused, context.config.unknown_fields == "warn", ACCEPTED))
    adapter = await adapter_of(context, request, fields.model)
    note(request, model=context.served.name_of(fields.model), user=fields.user)
    try:
        params = PoolingParams(
            task=task,
            dimensions=getattr(fields, "dimensions", None),
            normalize=getattr(fields, "normalize", None),
            use_activation=fields.use_activation,
            truncate_prompt_tokens=fields.truncate_prompt_tokens,
            prompt_name=getattr(fields, "prompt_name", None),
        )
        params.resolve(pooling_of(context.engine.llm_engine.pooling))  # what is wrong is no prompt's fault
        answer = PooledBody(context, request, fields, kind)
        prompts, names = await _prompts(context, request, fields)
        return answer, await answer.run(prompts, params, adapter, names)
    except Exception as error:
        raise as_api_error(error, list(type(fields).model_fields)) from error


async def _prompts(context: ServerContext, request: Request, fields: Any) -> tuple[list[PromptType], list[str]]:
    """(prompts, what the client calls each)"""
    if fields.messages is not None:
        if fields.input is not None:
            raise ApiError(400, "input: give input or messages, not both.", "input")
        with context.engine.accepted(), context.admit(1):
            return [await unless_gone(request, context.engine.on_reader(_conversation, context, fields))], ["messages"]
    for name in _OF_MESSAGES:
        if getattr(fields, name) is not None:
            raise ApiError(400, f"{name}: is for messages.", name)
    given, names = inputs(fields.input, context.config.max_texts)
    reader = PromptReader(context)
    return reader.pooled_prompts(given, names, cache_salt(fields.cache_salt)), names


def _conversation(context: ServerContext, fields: Any) -> PromptType:
    """Messages through the chat template, which opens no answer unasked; or one message that is a text or an image."""
    if pooling_of(context.engine.llm_engine.pooling).towers is not None:
        alone = {**PromptReader(context).alone(fields), **cache_salt(fields.cache_salt)}
        images = {} if fields.mm_processor_kwargs is None else {"mm_processor_kwargs": fields.mm_processor_kwargs}
        return {**alone, **images}
    body = fields.model_copy(update={"add_generation_prompt": bool(fields.add_generation_prompt)})
    chat = PromptReader(context).render(body, body.chat_template_kwargs)
    if chat.images and fields.truncate_prompt_tokens is not None:
        raise ApiError(400, "truncate_prompt_tokens: is not served together with images.", "truncate_prompt_tokens")
    prompt: dict[str, Any] = {"prompt_token_ids": chat.token_ids, **cache_salt(fields.cache_salt)}
    if chat.images:
        prompt["multi_modal_data"] = chat.multi_modal_data
    if fields.mm_processor_kwargs is not None:
        prompt["mm_processor_kwargs"] = fields.mm_processor_kwargs
    return prompt
