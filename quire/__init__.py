"""quire: one base model in memory; text, images and any number of LoRA adapters on one block-managed KV cache.

Importing this package is cheap: torch and transformers are imported when the first name that needs them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.errors import AdapterError, CheckpointError, QuireError, RequestError, UnsupportedModelError
    from quire.lora import AdapterInfo, LoadReport, LoRARequest
    from quire.platform.arguments import load_chat_template
    from quire.platform.async_engine import AsyncEngine
    from quire.platform.async_llm_engine import AsyncLLMEngine
    from quire.platform.beam import BeamSearchOutput, BeamSearchSequence
    from quire.platform.engine import LLMEngine
    from quire.platform.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from quire.platform.intake import PromptType
    from quire.platform.llm import LLM
    from quire.platform.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from quire.platform.prompt_types import TextPrompt, TokensPrompt
    from quire.platform.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "quire.platform.llm",
    "LLMEngine": "quire.platform.engine",
    "AsyncEngine": "quire.platform.async_engine",
    "AsyncLLMEngine": "quire.platform.async_llm_engine",
    "EngineArgs": "quire.platform.engine_args",
    "AsyncEngineArgs": "quire.platform.engine_args",
    "FlexibleArgumentParser": "quire.platform.engine_args",
    "PromptType": "quire.platform.intake",
    "TextPrompt": "quire.platform.prompt_types",
    "TokensPrompt": "quire.platform.prompt_types",
    "load_chat_template": "quire.platform.arguments",
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
    "AsyncLLMEngine",
    "EngineArgs",
    "AsyncEngineArgs",
    "FlexibleArgumentParser",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
    "load_chat_template",
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
        from quire.platform.not_served import name_not_served

        why = name_not_served(name)
        if why:  # an AttributeError's text would not be shown by `from quire import ...`
            raise ImportError(f"quire has no {name!r}{why}", name="quire")
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
