"""What a request's fields say about sampling -> what the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config import ServerConfig
from quire.platform.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.server.responses.errors import ApiError
from quire.server.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from quire.server.schemas.openai import Body
from quire.server.schemas.structured import FIELDS as SHAPES
from quire.server.schemas.structured import Shape

# Fields that `SamplingParams` has under the same name.
_SAME = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip

# What beam search leaves to be chosen.
_OF_BEAMS = {
    "model", "prompt", "messages", "use_beam_search", "n", "max_tokens", "max_completion_tokens", "temperature",
    "length_penalty", "ignore_eos", "include_stop_str_in_output", "stream", "user", "safety_identifier", "request_id",
    "cache_salt", "add_special_tokens", "truncate_prompt_tokens", "add_generation_prompt", "continue_final_message",
    "wait", "documents", "chat_template_kwargs", "mm_processor_kwargs", "reasoning_effort", "return_token_ids",
    "include_reasoning", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", *SHAPES,
}  # fmt: skip


Params = SamplingParams | BeamSearchParams


def sampling_params(
    body: Body, config: ServerConfig, logprobs: int | None, max_tokens: int | None, shape: Shape | None
) -> Params:
    """The parameters that a checked body asks for; what it leaves out has the server's defaults, then the API's.

    logprobs, max_tokens: which each route reads in its own way.  shape: of the answers. Raises ApiError and
    RequestError.
    """
    values: Any = body
    n = _count(values, config)
    if values.use_beam_search:
        return _beam_params(values, n, max_tokens, shape)
    if values.length_penalty not in (None, 1.0):
        raise ApiError(400, "length_penalty: is for use_beam_search=true.", param="length_penalty")
    asked = {name: getattr(values, name) for name in _SAME}
    asked["extra_args"] = values.vllm_xargs
    if asked["prompt_logprobs"] is None and logprobs is not None and hasattr(values, "prompt") and values.echo:
        asked["prompt_logprobs"] = logprobs
    given = {name: value for name, value in asked.items() if value is not None}
    best_of = values.best_of
    return SamplingParams(
        **{
            "max_tokens": max_tokens,
            **_defaults(config.default_sampling, max_tokens),
            **given,
            "n": best_of or n,
            # The best are found by their logprobs.
            "logprobs": 0 if logprobs is None and best_of is not None and best_of > n else logprobs,
            "structured_outputs": None if shape is None else shape.params,
            "output_kind": RequestOutputKind.DELTA if values.stream else RequestOutputKind.FINAL_ONLY,
        }
    )


def _defaults(recommended: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    return {name: value for name, value in recommended.items() if name != "max_tokens" or max_tokens is None}


def _count(body: Any, config: ServerConfig) -> int:
    """How many answers are wanted."""
    n = 1 if body.n is None else body.n
    for field, value in (("n", n), ("best_of", body.best_of)):
        if value is not None and not 1 <= value <= config.max_n:
            raise ApiError(400, f"{field}: {value} is refused: it is from 1 to {config.max_n}.", param=field)
    if body.best_of is not None and body.best_of < n:
        raise ApiError(400, f"best_of: {body.best_of} is less than n={n}.", param="best_of")
    if body.best_of is not None and body.best_of > n and body.stream:
        raise ApiError(400, "best_of: the best are known at the end only, so they cannot be streamed.", param="best_of")
    return n


def _beam_params(body: Any, width: int, max_tokens: int | None, shape: Shape | None) -> BeamSearchParams:
    for field in sorted(body.model_fields_set & (COMPLETION_FIELDS.keys() | CHAT_FIELDS.keys()) - _OF_BEAMS):
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field}: is not served together with use_beam_search.", param=field)
    if body.stream:
        raise ApiError(400, "stream: beams are known at the end only, so they cannot be streamed.", param="stream")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=2**31 if max_tokens is None else max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        structured_outputs=None if shape is None else shape.params,
    )


def stream_options(body: Any) -> tuple[bool, bool]:
    """(usage in a last chunk, usage in every chunk)"""
    options = body.stream_options or {}
    if options and not body.stream:
        raise ApiError(400, "stream_options: is for stream=true.", param="stream_options")
    unknown = set(options) - {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if unknown:
        raise ApiError(400, f"stream_options: there is no {sorted(unknown)[0]!r}.", param="stream_options")
    if options.get("include_obfuscation"):
        raise ApiError(400, "stream_options: include_obfuscation is not served.", param="stream_options")
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
