"""Which routes a server has answers to: those of models that generate, or those of models that pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends

from quire.pooling_types import PoolingSpec, PoolingTask
from quire.server.responses.errors import ApiError

_GENERATES = (
    "this model was loaded to generate text: for vectors of its hidden states start the server with --runner pooling "
    "--convert embed; for classes and scores, with a model that has them."
)
# By what a model is for: what a server of it makes, and the routes that it has.
_MADE = {
    "embed": ("vectors", "/v1/embeddings, /pooling, /score and /rerank"),
    "classify": ("classes", "/classify, /pooling and, with one label, /score and /rerank"),
    "reward": ("rewards", "/pooling and /classify"),
}
# The same of a model that has a row for each token, or step, and none for all of a text.
_MADE_OF_TOKENS = {
    "embed": ("vectors of the tokens", "/pooling, /score and /rerank"),
    "classify": ("classes of the tokens", "/pooling"),
    "reward": ("rewards of the steps", "/pooling"),
}


def about(spec: PoolingSpec) -> str:
    """What a server makes, and where, as the end of a sentence."""
    made, routes = (_MADE_OF_TOKENS if spec.has_many_rows else _MADE)[spec.convert]
    return f"makes {made} of texts and generates none: it has {routes}"


def check_generates(spec: PoolingSpec | None) -> None:
    """Raise ApiError where a model pools."""
    if spec is not None:
        raise ApiError(400, f"this server {about(spec)}; a model generates with --runner generate.")


def pooling_of(spec: PoolingSpec | None, *tasks: PoolingTask) -> PoolingSpec:
    """What a model makes of prompts. Raises ApiError where it generates, or has none of the tasks that are named."""
    if spec is None:
        raise ApiError(400, _GENERATES)
    if tasks and not set(tasks) & set(spec.tasks):
        raise ApiError(
            400, f"{tasks[0]}: this model was loaded with --convert {spec.convert} and can {', '.join(spec.tasks)}."
        )
    return spec


def only_generators(spec: PoolingSpec | None) -> Sequence[Any]:
    """Dependencies of routes that generate: before a body is looked at."""
    return [] if spec is None else [Depends(_refusal(lambda: check_generates(spec)))]


def only_poolers(spec: PoolingSpec | None) -> Sequence[Any]:
    """The same of routes that pool."""
    return [] if spec is not None else [Depends(_refusal(lambda: pooling_of(spec)))]


def _refusal(check: Any) -> Any:
    async def refuse() -> None:
        check()

    return refuse
