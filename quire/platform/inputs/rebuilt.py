"""Tokenizers that transformers builds anew, by a class of its own, of the vocabulary in a tokenizer.json.

Where the class would make of it what the file says anyway, the file can be taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.plain_config import tokenizer_pipeline

_END = "<|endoftext|>"
# Special tokens that a class has where tokenizer_config.json says nothing of them.
_DEFAULTS = {
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
}
# Fields that these classes take, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "errors": ("replace",), "add_prefix_space": (False,), "split_special_tokens": (False,),
}  # fmt: skip
# Of the model in tokenizer.json: what these classes never have.
_ABSENT = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
# Of how bytes are shown: they change offsets, which nobody asks for here.
_IRRELEVANT = ("trim_offsets",)


class Uncertain(Exception):
    """It is transformers' to say what the files mean."""


def settings(name: str, model_type: Any, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """tokenizer_config.json as it would be if its class were none of its own. Raises Uncertain."""
    pipeline = tokenizer_pipeline(name, model_type)
    if pipeline is None:
        raise Uncertain
    try:
        found = json.loads((path / "tokenizer.json").read_bytes())
        return {**_DEFAULTS[name], **_checked(name, config, found, pipeline)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise Uncertain from error


def _checked(name: str, config: Mapping[str, Any], found: Any, pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """found: tokenizer.json. Raises Uncertain, or another error for one that is damaged."""
    model, added = found.get("model"), found.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added, list) or model.get("type") != "BPE":
        raise Uncertain
    if any(model.get(flag) for flag in _ABSENT) or not isinstance(model.get("vocab"), dict):
        raise Uncertain
    for part in ("normalizer", "pre_tokenizer"):
        if _relevant(found.get(part)) != _relevant(pipeline[part]):
            raise Uncertain
    decoder = found.get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != pipeline["decoder"]["type"]:
        raise Uncertain
    _check_added(added, model["vocab"], config.get("added_tokens_decoder"))
    for field, values in _NEUTRAL.items():
        unset = field == "add_prefix_space" and name == "Qwen2Tokenizer" and config.get(field) is None
        if field in config and config[field] not in values and not unset:
            raise Uncertain
    return {field: value for field, value in config.items() if field not in _NEUTRAL}


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _relevant(one) for name, one in value.items() if name not in _IRRELEVANT}
    return [_relevant(one) for one in value] if isinstance(value, list) else value


def _check_added(added: list[Any], vocabulary: Mapping[str, int], told: Any) -> None:
    """Added tokens get the numbers that they have, one after the other, and are no others. Raises Uncertain."""
    if told is not None and (not isinstance(told, dict) or set(told) != {str(one["id"]) for one in added}):
        raise Uncertain
    following = len(vocabulary)
    for token in sorted(added, key=lambda one: int(one["id"])):
        number = vocabulary.get(token["content"], following)
        following += token["content"] not in vocabulary
        plain = token["special"] and not any(token[one] for one in ("lstrip", "rstrip", "single_word", "normalized"))
        if number != token["id"] or (token["special"] and not plain):
            raise Uncertain
    if set(vocabulary.values()) != set(range(len(vocabulary))):
        raise Uncertain
