"""A request on its way in: what is known of it before it is queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.lora import LoRARequest
from quire.multimodal import EmbeddedRows
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.pooling.params import PoolingParams
from quire.platform.sampling.logits_processors.chain import Chain
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.pooling_types import PoolingInput
from quire.types import AdapterUse

Params = SamplingParams | BeamSearchParams | PoolingParams


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt as it was given, checked as far as it can be before its images are looked at.

    ids: with one marker for each image (or with all placeholders). images: their sources; settings: for their
    processor. seed: the request's, drawn when it arrived: images are ready in any order. processors: what
    changes its logits. stops: its stop strings, prepared, or None. adapters: the versions that it runs with, and lora,
    how the caller named them. embeds: the prompt's rows, where it came as embeddings: ids are zeros then. pooling:
    what is made of it in the place of tokens.
    """

    text: str | None
    ids: list[int]
    salt: str | None
    images: list[Any] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    processors: Chain = ()
    stops: StopStrings | None = None
    adapters: AdapterUse = ()
    lora: LoRARequest | None = None
    embeds: EmbeddedRows | None = None
    pooling: PoolingInput | None = None


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request that was read: checked as far as it can be before its images are looked at, its text made tokens.

    It holds its adapters: it must be given to `LLMEngine.submit`, or be discarded. serial: its place in the order of
    arrival; time: when it arrived, by `time.monotonic()`. discard: let go of a request that will not be submitted; any
    thread may call it.
    """

    request_id: str
    prompt: ProcessedPrompt
    params: Params
    serial: int
    time: float
    discard: Callable[[], None]
