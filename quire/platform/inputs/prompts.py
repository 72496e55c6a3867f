"""Prompts as dicts, by vLLM's names for their shapes. At run time each is a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


class _More(TypedDict, total=False):
    """multi_modal_data: {"image": one or a list}. multi_modal_uuids: {"image": names, one for each}; what came with a
    name before may be None. cache_salt: requests of different salts share no cached blocks."""

    multi_modal_data: dict[str, Any]
    multi_modal_uuids: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


class TextPrompt(_More):
    """A text."""

    prompt: str


class _Embeds(TypedDict):
    prompt_embeds: Any


class EmbedsPrompt(_Embeds, total=False):
    """Embeddings [tokens, size], a float tensor, with `enable_prompt_embeds`. prompt: the text that outputs show."""

    prompt: str
    cache_salt: str


class _Tokens(_More):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_Tokens, total=False):
    """Token ids. prompt: the text that outputs show for them."""

    prompt: str
