"""Bodies of the routes that make vectors, classes and scores: OpenAI's, vLLM's, Jina's and Cohere's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.pooling_types import PoolingTask
from quire.server.responses.errors import ApiError
from quire.server.schemas.fields import ACCEPTED as ACCEPTED_BY_ALL
from quire.server.schemas.fields import REFUSED_IN_CHAT, Acceptance, Refusal, bounded
from quire.server.schemas.openai import request_model

# What clients send that changes no answer.
ACCEPTED: dict[str, Acceptance] = {
    **{name: ACCEPTED_BY_ALL[name] for name in ("metadata", "store", "service_tier", "keep_alive")},
    "max_chunks_per_doc": Acceptance("Cohere's and Jina's; a document is read in one piece"),
}
_SPECIAL = "texts get the special tokens that the model knows them with; to leave them out, send token ids"
_NAMED = "prompt_name names what is put before a text"

REFUSED: dict[str, Refusal] = {
    "priority": Refusal("requests are served in the order in which they came", (0,)),
    "add_special_tokens": Refusal(_SPECIAL, (True,)),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the first tokens", ("right",)),
    "input_type": Refusal(_NAMED),
    "instruction": Refusal(_NAMED),
}
REFUSED_OF_VECTORS: dict[str, Refusal] = {
    **REFUSED,
    "embed_dtype": Refusal("numbers have 32 bits", ("float32", "float")),
    "endianness": Refusal("base64 holds little-endian numbers", ("little", "native")),
    "chat_template": REFUSED_IN_CHAT["chat_template"],
}
REFUSED_OF_CLASSES: dict[str, Refusal] = {**REFUSED, "chat_template": REFUSED_IN_CHAT["chat_template"]}
REFUSED_OF_DOCUMENTS: dict[str, Refusal] = {
    **REFUSED,
    "max_tokens_per_doc": Refusal("truncate_prompt_tokens bounds a query and a document together"),
    "rank_fields": Refusal("documents are texts", (["text"],)),
}

_COMMON: dict[str, Any] = {
    "model": str,
    "user": str,
    "request_id": str,
    "cache_salt": str,
    "truncate_prompt_tokens": int,
    "use_activation": bool,
}
_INPUT: dict[str, Any] = {
    **_COMMON,
    "input": bounded(str | list[str] | list[int] | list[list[int]]),
    "messages": bounded(list[dict[str, Any]]),
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "chat_template_kwargs": dict[str, Any],
    "mm_processor_kwargs": dict[str, Any],
    "prompt_name": str,
}
_TEXTS = bounded(str | list[str])

EMBEDDING_FIELDS: dict[str, Any] = {
    **_INPUT,
    "encoding_format": Literal["float", "base64"],
    "dimensions": int,
    "normalize": bool,
}
POOLING_FIELDS: dict[str, Any] = {**EMBEDDING_FIELDS, "task": PoolingTask}
CLASSIFY_FIELDS: dict[str, Any] = {name: hint for name, hint in _INPUT.items() if name != "prompt_name"}
SCORE_FIELDS: dict[str, Any] = {
    **_COMMON,
    **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items"), _TEXTS),
}
RERANK_FIELDS: dict[str, Any] = {
    **_COMMON,
    "query": str,
    "documents": bounded(list[str | dict[str, Any]]),
    "top_n": Annotated[int, Field(ge=0)],
    "return_documents": bool,
}

EmbeddingRequest = request_model("EmbeddingRequest", EMBEDDING_FIELDS, ACCEPTED, REFUSED_OF_VECTORS, {})
EmbeddingRequest.__doc__ = "OpenAI's /v1/embeddings, with vLLM's fields beside it: texts, token ids, or messages."

PoolingRequest = request_model("PoolingRequest", POOLING_FIELDS, ACCEPTED, REFUSED_OF_VECTORS, {})
PoolingRequest.__doc__ = "vLLM's /pooling: what a task makes of each prompt."

ClassifyRequest = request_model("ClassifyRequest", CLASSIFY_FIELDS, ACCEPTED, REFUSED_OF_CLASSES, {})
ClassifyRequest.__doc__ = "vLLM's /classify."

ScoreRequest = request_model("ScoreRequest", SCORE_FIELDS, ACCEPTED, REFUSED, {})
ScoreRequest.__doc__ = "vLLM's /score: pairs of texts, by one of four pairs of fields."

_ASKED = {"query": RERANK_FIELDS["query"], "documents": RERANK_FIELDS["documents"]}
RerankRequest = request_model("RerankRequest", RERANK_FIELDS, ACCEPTED, REFUSED_OF_DOCUMENTS, _ASKED)
RerankRequest.__doc__ = "Jina's and Cohere's rerank: documents, and what is sought in them."

# Names of a score's two sides, of which one pair is given.
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


def inputs(given: Any, most: int) -> tuple[list[Any], list[str]]:
    """The prompts of `input`, and what to call each where it is at fault. Raises ApiError."""
    if given is None:
        raise ApiError(400, "input: is missing: give a text, token ids, or a list of these; or messages.", "input")
    if given == []:
        raise ApiError(400, "input: is empty; it must have one text at least.", "input")
    if isinstance(given, str) or isinstance(given[0], int):
        return [given], ["input"]
    check_number("input", given, most)
    return given, [f"input[{place}]" for place in range(len(given))]


def check_number(name: str, given: list[Any], most: int) -> None:
    """Raise ApiError for more texts than a request may have."""
    if len(given) > most:
        raise ApiError(
            400, f"{name}: has {len(given)} texts, and the limit is {most} (--max-texts): send them in parts.", name
        )


def sides(body: Any, most: int) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """The two sides of a body's scores, each with its field's name: as many texts, or one first. Raises ApiError."""
    given = {name: getattr(body, name) for pair in _SIDES for name in pair if getattr(body, name) is not None}
    names = next((pair for pair in _SIDES if set(pair) == given.keys()), None)
    if names is None:
        known = "; or ".join(" and ".join(pair) for pair in _SIDES)
        raise ApiError(400, f"{next(iter(given), 'text_1')}: give {known}: these two, and no others.")
    first, second = ([one] if isinstance(one, str) else list(one) for one in map(given.__getitem__, names))
    for name, side in zip(names, (first, second), strict=True):
        if not side:
            raise ApiError(400, f"{name}: is empty; it must have one text at least.", name)
        check_number(name, side, most)
    if len(first) not in (1, len(second)):
        raise ApiError(
            400, f"{names[0]}: has {len(first)} texts and {names[1]} has {len(second)}: as many, or one in {names[0]}.",
            names[0],
        )  # fmt: skip
    return (names[0], first), (names[1], second)


def texts_of(documents: list[str | Mapping[str, Any]], most: int) -> list[str]:
    """The texts of a rerank's documents. Raises ApiError."""
    if not documents:
        raise ApiError(400, "documents: is empty; it must have one document at least.", "documents")
    check_number("documents", documents, most)
    texts = []
    for place, one in enumerate(documents):
        text = one.get("text") if isinstance(one, Mapping) and one.keys() == {"text"} else one
        if not isinstance(text, str):
            raise ApiError(400, f'documents[{place}]: must be a text, or {{"text": ...}} and no more.', "documents")
        texts.append(text)
    return texts
