"""What tools ask a server about: what it is, what it runs, how loaded it is, what its tokenizer is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from quire import __version__
from quire.platform.inputs.chat import template_of
from quire.pooling_types import PoolingSpec
from quire.server.context import ServerContext, context_of
from quire.server.responses.errors import ApiError, Json

router = APIRouter()

# Of tokenizer_config.json: what says how texts are made tokens. The rest are paths, or of other programs.
_TOKENIZER_FIELDS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "legacy", "padding_side",
    "truncation_side", "split_special_tokens", "model_max_length", "errors",
)  # fmt: skip
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_LIMITS = ("max_queue", "max_request_bytes", "max_prompts", "max_n", "response_role", "unknown_fields")
_HUGE = 1 << 53  # transformers' "no limit" is a number that JSON's readers do not all take


@router.get("/")
async def root() -> JSONResponse:
    """What this is, for who opens it in a browser."""
    return JSONResponse(
        {"name": "quire", "version": __version__, "api": "/v1", "models": "/v1/models", "routes": "/openapi.json"}
    )


@router.get("/load")
async def load(request: Request) -> JSONResponse:
    """How many requests are being answered, as vLLM has it, and how many sequences of them run and wait."""
    context = context_of(request)
    stats = context.engine.stats()
    return JSONResponse(
        {"server_load": context.engine.num_requests, "running": stats.running, "waiting": stats.waiting}
    )


@router.get("/server_info")
async def server_info(request: Request) -> JSONResponse:
    """What runs, and with which settings; no keys, no folders and no hosts."""
    context = context_of(request)
    core = context.engine.llm_engine
    facts = core.executor.facts
    cache, scheduler = core.config.cache, core.config.scheduler
    spec = core.input_processor.image_spec
    return JSONResponse(
        {
            "version": __version__,
            "runner": "generate" if core.pooling is None else "pooling",
            "pooling": None if core.pooling is None else _pooling(core.pooling),
            "model": context.served.names[0],
            "served_model_names": list(context.served.names),
            "max_model_len": core.limits.max_model_len,
            "vocab_size": core.limits.vocab_size,
            "dtype": str(facts.dtype).removeprefix("torch."),
            "device": facts.device,
            "kernels": facts.kernels,
            "images": spec is not None and "image" in spec.markers,
            "videos": spec is not None and "video" in spec.markers,
            "audio": spec is not None and "audio" in spec.markers,
            "adapters": core.adapters is not None,
            "kv_cache_tokens": core.limits.pool_tokens,
            "cache": asdict(cache),
            "scheduler": asdict(scheduler),
            "server": {name: getattr(context.config, name) for name in _LIMITS},
        }
    )


def _pooling(spec: PoolingSpec) -> dict[str, Any]:
    return {
        "convert": spec.convert,
        "tasks": list(spec.tasks),
        "pooling_type": spec.kind.upper(),
        "activation": spec.activation,
        "width": spec.width,
        "dimensions": None if spec.dimensions is None else list(spec.dimensions),
        "labels": list(spec.labels),
        "prompts": sorted(spec.prompts),
    }


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> JSONResponse:
    """The tokenizer's settings, special tokens and chat template, as lm-eval's remote tokenizer asks for them."""
    context = context_of(request)
    tokenizer = context.engine.llm_engine.tokenizer
    if tokenizer is None:
        raise ApiError(404, "no tokenizer is loaded.", code="no_tokenizer")
    return Json(await context.engine.on_reader(_described, context, tokenizer))


def _described(context: ServerContext, tokenizer: Any) -> dict[str, Any]:
    given = getattr(tokenizer, "init_kwargs", {})
    told = {name: given[name] for name in _TOKENIZER_FIELDS if type(given.get(name)) in (bool, str, int)}
    if told.get("model_max_length", 0) > _HUGE:
        del told["model_max_length"]
    tokens = {name: getattr(tokenizer, name, None) for name in _TOKENS}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **told,
        **{name: None if token is None else str(token) for name, token in tokens.items()},
        "additional_special_tokens": [str(token) for token in getattr(tokenizer, "additional_special_tokens", ())],
        "vocab_size": len(tokenizer),
        "chat_template": _template(context, tokenizer),
    }


def _template(context: ServerContext, tokenizer: Any) -> str | None:
    """The one that this server renders conversations with."""
    if context.config.chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        return None
    return template_of(tokenizer, context.config.chat_template)
