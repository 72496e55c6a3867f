"""A prompt that comes as token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from quire.errors import RequestError


def check_ids(request_id: str, ids: Any, vocab_size: int, others: Collection[int]) -> list[int]:
    """The ids as a list. others: those beyond the vocabulary that a prompt may have. Raises RequestError."""
    if isinstance(ids, (bytes, bytearray)) or not (isinstance(ids, Sequence) or hasattr(ids, "tolist")):
        raise RequestError(
            f"request {request_id}: a prompt is a text, a list of token ids or a dict, not {type(ids).__name__}"
        )
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(ids, list):
        raise RequestError(f"request {request_id}: a prompt's token ids are one-dimensional, not a single {ids!r}")
    for place, token in enumerate(ids):
        known = type(token) is int and (0 <= token < vocab_size or token in others)
        if not known:
            raise RequestError(
                f"request {request_id}: prompt token {place} is {token!r}; "
                f"token ids are integers from 0 to {vocab_size - 1}"
            )
    return ids
