"""quire: one base model in memory; text, images and any number of LoRA adapters on one block-managed KV cache.

Importing this package is cheap: torch and transformers are imported when the first name that needs them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.garbage import collector_waits

if TYPE_CHECKING:
    from quire.config.convert import load_chat_template
    from quire.config.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from quire.errors import AdapterError, CheckpointError, QuireError, RequestError, UnsupportedModelError
    from quire.lora import AdapterInfo, LoadReport, LoRARequest
    from quire.platform.engine.async_engine import AsyncEngine
    from quire.platform.engine.async_llm_engine import AsyncLLMEngine
    from quire.platform.engine.llm import LLM
    from quire.platform.engine.llm_engine import LLMEngine
    from quire.platform.inputs.processor import PromptType
    from quire.platform.inputs.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from quire.platform.outputs.messages.message import Message, ToolCall
    from quire.platform.outputs.messages.reasoning_formats import ReasoningFormat
    from quire.platform.outputs.messages.tool_format import ToolFormat
    from quire.platform.outputs.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
    )
    from quire.platform.outputs.pooled import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.platform.pooling.params import PoolingParams
    from quire.platform.sampling.logits_processors import BitMask, LogitsProcessor, ProcessorRequest, TokenMask
    from quire.platform.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
    from quire.platform.sampling.structured.guided import GuidedDecodingParams
    from quire.platform.sampling.structured.params import ReasoningTexts, StructuredOutputsParams
    from quire.platform.scheduling.metrics import RequestMetrics

__version__ = "0.1.0"

_HOME = {
    "LLM": "quire.platform.engine.llm",
    "LLMEngine": "quire.platform.engine.llm_engine",
    "AsyncEngine": "quire.platform.engine.async_engine",
    "AsyncLLMEngine": "quire.platform.engine.async_llm_engine",
    "EngineArgs": "quire.config.engine_args",
    "AsyncEngineArgs": "quire.config.engine_args",
    "FlexibleArgumentParser": "quire.config.engine_args",
    "PromptType": "quire.platform.inputs.processor",
    "TextPrompt": "quire.platform.inputs.prompts",
    "TokensPrompt": "quire.platform.inputs.prompts",
    "EmbedsPrompt": "quire.platform.inputs.prompts",
    "load_chat_template": "quire.config.convert",
    "LoRARequest": "quire.lora",
    "LoadReport": "quire.lora",
    "AdapterInfo": "quire.lora",
    "AdapterError": "quire.errors",
    "SamplingParams": "quire.platform.sampling.params",
    "BeamSearchParams": "quire.platform.sampling.params",
    "StructuredOutputsParams": "quire.platform.sampling.structured.params",
    "GuidedDecodingParams": "quire.platform.sampling.structured.guided",
    "ReasoningTexts": "quire.platform.sampling.structured.params",
    "Message": "quire.platform.outputs.messages.message",
    "ToolCall": "quire.platform.outputs.messages.message",
    "ReasoningFormat": "quire.platform.outputs.messages.reasoning_formats",
    "ToolFormat": "quire.platform.outputs.messages.tool_format",
    "LogitsProcessor": "quire.platform.sampling.logits_processors",
    "TokenMask": "quire.platform.sampling.logits_processors",
    "BitMask": "quire.platform.sampling.logits_processors",
    "ProcessorRequest": "quire.platform.sampling.logits_processors",
    "BeamSearchOutput": "quire.platform.outputs.outputs",
    "BeamSearchSequence": "quire.platform.outputs.outputs",
    "RequestOutputKind": "quire.platform.sampling.params",
    "RequestOutput": "quire.platform.outputs.outputs",
    "CompletionOutput": "quire.platform.outputs.outputs",
    "Logprob": "quire.platform.outputs.outputs",
    "PoolingParams": "quire.platform.pooling.params",
    "PoolingOutput": "quire.platform.outputs.pooled",
    "EmbeddingOutput": "quire.platform.outputs.pooled",
    "ClassificationOutput": "quire.platform.outputs.pooled",
    "ScoringOutput": "quire.platform.outputs.pooled",
    "PoolingRequestOutput": "quire.platform.outputs.pooled",
    "EmbeddingRequestOutput": "quire.platform.outputs.pooled",
    "ClassificationRequestOutput": "quire.platform.outputs.pooled",
    "ScoringRequestOutput": "quire.platform.outputs.pooled",
    "RequestMetrics": "quire.platform.scheduling.metrics",
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
    "EmbedsPrompt",
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
    "PoolingParams",
    "PoolingOutput",
    "EmbeddingOutput",
    "ClassificationOutput",
    "ScoringOutput",
    "PoolingRequestOutput",
    "EmbeddingRequestOutput",
    "ClassificationRequestOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "GuidedDecodingParams",
    "ReasoningTexts",
    "Message",
    "ToolCall",
    "ToolFormat",
    "ReasoningFormat",
    "LogitsProcessor",
    "TokenMask",
    "BitMask",
    "ProcessorRequest",
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
        from quire.config.not_served import name_not_served

        why = name_not_served(name)
        if why:  # an AttributeError's text would not be shown by `from quire import ...`
            raise ImportError(f"quire has no {name!r}{why}", name="quire")
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    with collector_waits():
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
