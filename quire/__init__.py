"""quire: one base model in memory; text, images and any number of LoRA adapters on one block-managed KV cache.

Importing this package is cheap: torch and transformers are imported when the first name that needs them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.errors import AdapterError, CheckpointError, QuireError, RequestError, UnsupportedModelError
    from quire.lora import AdapterInfo, LoadReport, LoRARequest
    from quire.platform.async_engine import AsyncEngine
    from quire.platform.beam import BeamSearchOutput, BeamSearchSequence
    from quire.platform.engine import LLMEngine
    from quire.platform.llm import LLM
    from quire.platform.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from quire.platform.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "quire.platform.llm",
    "LLMEngine": "quire.platform.engine",
    "AsyncEngine": "quire.platform.async_engine",
    "LoRARequest": "quire.lora",
    "LoadReport": "quire.lora",
    "AdapterInfo": "quire.lora",
    "AdapterError": "quire.errors",
    "SamplingParams": "quire.platform.sampling_params",
    "BeamSearchParams": "quire.platform.sampling_params",
    "BeamSearchOutput": "quire.platform.beam",
    "BeamSearchSequence": "quire.platform.beam",
    "RequestOutputKind": "quire.platform.sampling_params",
    "RequestOutput": "quire.platform.outputs",
    "CompletionOutput": "quire.platform.outputs",
    "Logprob": "quire.platform.outputs",
    "RequestMetrics": "quire.platform.outputs",
    "QuireError": "quire.errors",
    "UnsupportedModelError": "quire.errors",
    "CheckpointError": "quire.errors",
    "RequestError": "quire.errors",
}

__all__ = [  # noqa: RUF022 (the order that a reader wants)
    "LLM",
    "LLMEngine",
    "AsyncEngine",
    "SamplingParams",
    "LoRARequest",
    "BeamSearchParams",
    "RequestOutputKind",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "LoadReport",
    "AdapterInfo",
    "QuireError",
    "UnsupportedModelError",
    "CheckpointError",
    "AdapterError",
    "RequestError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
