"""What a request gives back that generates nothing: vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.lora import LoRARequest
from quire.platform.outputs.outputs import Output
from quire.platform.outputs.sequence_text import RequestText
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.metrics import RequestMetrics
from quire.platform.scheduling.request import Request

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What was made of a prompt. data: float32, [numbers], or [tokens, numbers] of a task that has a row a token."""

    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Each class's probability, or its bare number where use_activation is False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


@dataclass(frozen=True, slots=True)
class PooledRequestOutput:
    """A request and what was made of its prompt.

    outputs: a PoolingOutput; of `LLM.embed`, `classify` and `score` their own. num_cached_tokens: as in RequestMetrics.
    lora_request: the adapter that it ran with. failure: why it has none, if so: `outputs` is of no use then.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: Sequence[int]
    finished: bool = True
    num_cached_tokens: int | None = None
    prompt: str | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    lora_request: LoRARequest | None = None
    failure: Failure | None = None


class PoolingRequestOutput(PooledRequestOutput):
    """outputs: `PoolingOutput`."""


AnyOutput = Output | PoolingRequestOutput


class EmbeddingRequestOutput(PooledRequestOutput):
    """outputs: `EmbeddingOutput`."""


class ClassificationRequestOutput(PooledRequestOutput):
    """outputs: `ClassificationOutput`."""


class ScoringRequestOutput(PooledRequestOutput):
    """outputs: `ScoringOutput`."""


class PooledMaker:
    """Makes a PoolingRequestOutput, once the request has ended."""

    def make(self, request: Request, texts: RequestText, finished: bool) -> PoolingRequestOutput | None:
        """After a step; None while there are tokens to compute."""
        import torch

        assert request.pooling is not None
        if not finished:
            return None
        rows = np.concatenate(request.pooled) if request.pooled else np.zeros((0, 0), np.float32)
        if request.pooling.kind not in ("all", "step") and len(rows):
            rows = rows[0]
        return PoolingRequestOutput(
            request_id=request.request_id,
            outputs=PoolingOutput(torch.from_numpy(rows)),
            prompt_token_ids=request.shown_ids,
            finished=True,
            num_cached_tokens=request.metrics.num_cached_tokens,
            prompt=request.prompt,
            metrics=request.metrics.copy(),
            lora_request=request.lora,
            failure=request.failure,
        )
