"""Speculative decoding: where draft tokens come from."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import QuireError

Method = Literal["ngram", "suffix", "draft_model"]

_MOST_TOKENS = 64
_MOST_MATCH = 32
_OF_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
_OF_MODEL = ("revision", "quantization")
_KEYS = ("method", "model", *_OF_MODEL, "num_speculative_tokens", *_OF_LOOKUP)
_DRAFT_TOKENS = 5  # of a draft model, each of which takes a pass of it
# What vLLM has and quire has not, and why.
_NOT_SERVED = {
    "disable_by_batch_size": "drafts are left out by themselves where a batch gains nothing by them",
    "speculative_disable_by_batch_size": "drafts are left out by themselves where a batch gains nothing by them",
    "max_model_len": "drafts are made up to the model's own length",
    "speculative_token_tree": "drafts are one run of tokens",
    "rejection_sample_method": "a draft is kept where it is the token that is drawn anyway, and in no other case",
    "posterior_threshold": "a draft is kept where it is the token that is drawn anyway, and in no other case",
    "posterior_alpha": "a draft is kept where it is the token that is drawn anyway, and in no other case",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How draft tokens are made.

    method: "ngram", by looking up the last tokens in the sequence itself (prompt lookup); "suffix", in the sequence and
    in earlier answers; "draft_model", by a smaller model. num_speculative_tokens: of one sequence in a step at most.
    prompt_lookup_min: how many of the last tokens must have stood in a row before; prompt_lookup_max: what counts as
    long a match as any. model: the smaller one, a directory, a hub id or a gguf file; revision, quantization: of it, as
    the engine's settings have them.
    """

    method: Method = "ngram"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 8
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None


def drafts_by_model(given: Any) -> bool:
    """Whether these settings, or None, name a draft model."""
    return given is not None and speculative(given).model is not None


def speculative(given: Any) -> SpeculativeConfig:
    """vLLM's speculative_config, a mapping. Raises QuireError for what is not served."""
    if not isinstance(given, Mapping):
        raise QuireError(f"speculative_config={given!r}: must be an object, {{'method': 'ngram'}} for one.")
    fields = {name: value for name, value in given.items() if value is not None}
    if fields.pop("draft_tensor_parallel_size", 1) != 1:
        raise QuireError("speculative_config: draft_tensor_parallel_size: one process computes; leave it out.")
    for name in fields:
        if name in _NOT_SERVED:
            raise QuireError(f"speculative_config: {name}: {_NOT_SERVED[name]}; leave it out.")
        if name not in _KEYS:
            raise QuireError(f"speculative_config: {name!r} is unknown; it has {', '.join(_KEYS)}.")
    method = _method(fields)
    strange = _OF_LOOKUP if method == "draft_model" else _OF_MODEL
    for name in fields:
        if name in strange:
            raise QuireError(f"speculative_config: {name}: method {method!r} has no use for it; leave it out.")
    lengths = {name: value for name, value in fields.items() if name not in ("method", "model", *_OF_MODEL)}
    if method == "draft_model":
        lengths.setdefault("num_speculative_tokens", _DRAFT_TOKENS)
        return SpeculativeConfig(method, **_checked(lengths), **_texts(fields))
    config = SpeculativeConfig(method, **_checked(lengths))
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise QuireError(
            f"speculative_config: prompt_lookup_min={config.prompt_lookup_min} is above "
            f"prompt_lookup_max={config.prompt_lookup_max}; lower the first."
        )
    return config


def _method(fields: Mapping[str, Any]) -> Method:
    model = fields.get("model")
    looks_up = model in (None, "ngram", "[ngram]")  # vLLM's "[ngram]"
    method = fields.get("method", "ngram" if looks_up else "draft_model")
    if isinstance(method, str):
        method = method.strip("[]")
    if method == "ngram" and looks_up:
        return "ngram"
    if method == "suffix" and model is None:
        return "suffix"
    if method == "draft_model" and not looks_up:
        return "draft_model"
    raise QuireError(
        f"speculative_config: method={fields.get('method')!r}, model={model!r}: is ngram or suffix, without a model, "
        "or draft_model, with one."
    )


def _texts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What names the draft model and its weights."""
    found = {name: fields[name] for name in ("model", *_OF_MODEL) if name in fields}
    for name, value in found.items():
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise QuireError(f"speculative_config: {name}={value!r}: must be a text.")
    return {name: os.fspath(value) for name, value in found.items()}


def _checked(lengths: dict[str, Any]) -> dict[str, Any]:
    """Numbers within their limits. One of the two ends of a match alone is both, as vLLM has it."""
    for name, value in lengths.items():
        most = _MOST_TOKENS if name == "num_speculative_tokens" else _MOST_MATCH
        if type(value) is not int or not 1 <= value <= most:
            raise QuireError(f"speculative_config: {name}={value!r}: must be a whole number from 1 to {most}.")
    shortest, longest = lengths.get("prompt_lookup_min"), lengths.get("prompt_lookup_max")
    if shortest is None and longest is not None:
        lengths["prompt_lookup_min"] = min(longest, SpeculativeConfig.prompt_lookup_min)
    if longest is None and shortest is not None:
        lengths["prompt_lookup_max"] = max(shortest, SpeculativeConfig.prompt_lookup_max)
    return lengths
