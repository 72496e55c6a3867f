"""Prompts as dicts, by vLLM's names for their shapes. At run time each is a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


class _More(TypedDict, total=False):
    """multi_modal_data: {"image": one or a list}. cache_salt: requests of different salts share no cached blocks."""

    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


class TextPrompt(_More):
    """A text."""

    prompt: str


class _Tokens(_More):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_Tokens, total=False):
    """Token ids. prompt: the text that outputs show for them."""

    prompt: str
