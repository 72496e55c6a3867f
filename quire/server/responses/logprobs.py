"""Logprobs in the forms of the two routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.platform.outputs.outputs import CompletionOutput, Logprob, TokenLogprobs

_LEAST = -9999.0  # JSON has no infinity; a token that cannot come has this, as in OpenAI's API


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """A token as a text; as_ids: unambiguously, as "token_id:7"."""
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _likeliest(entries: TokenLogprobs, most: int) -> list[tuple[int, Logprob]]:
    """most: -1 for all of them."""
    return sorted(entries.items(), key=lambda item: item[1].rank or 0)[: None if most < 0 else most]


def chat_logprobs(output: CompletionOutput, most: int, as_ids: bool) -> dict[str, Any] | None:
    """The form of /v1/chat/completions. most: alternatives of each token that are shown."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        top = _likeliest(entries, most)
        content.append(
            {
                **_chat_token(token_id, entries[token_id], as_ids),
                "top_logprobs": [_chat_token(other, entry, as_ids) for other, entry in top],
            }
        )
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    text = token_text(token_id, entry, as_ids)
    return {"token": text, "logprob": max(entry.logprob, _LEAST), "bytes": list(entry.token_bytes or b"")}


class CompletionLogprobs:
    """The form of /v1/completions, for one choice: offsets go on from chunk to chunk."""

    def __init__(self, most: int, as_ids: bool) -> None:
        self._most = most
        self._as_ids = as_ids
        self._offset = 0

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, values, offsets = list[str](), list[float | None](), list[int]()
        tops = list[dict[str, float] | None]()
        for token_id, entries in zip(token_ids, logprobs, strict=True):
            offsets.append(self._offset)
            tokens.append(token_text(token_id, entries[token_id], self._as_ids))
            values.append(max(entries[token_id].logprob, _LEAST))
            tops.append(self._top(token_id, entries))
            self._offset += len(entries[token_id].decoded_token or "")
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def first(self, text: str, token_id: int, prompt: str) -> dict[str, Any]:
        """A prompt's first token, which nothing foretells; it may stand before the prompt's text (BOS)."""
        self._offset += len(text) if prompt.startswith(text) else 0
        shown = f"token_id:{token_id}" if self._as_ids else text
        return {"tokens": [shown], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def _top(self, token_id: int, entries: TokenLogprobs) -> dict[str, float]:
        """The likeliest, and the chosen one, as OpenAI has it: up to one more than were asked for."""
        best = _likeliest(entries, self._most)
        shown: dict[str, float] = {}
        for other, entry in best:  # of equal texts the likeliest: parts of a character all look alike
            shown.setdefault(token_text(other, entry, self._as_ids), max(entry.logprob, _LEAST))
        chosen = entries[token_id]
        shown.setdefault(token_text(token_id, chosen, self._as_ids), max(chosen.logprob, _LEAST))
        return shown


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several of /v1/completions' logprobs, one after another."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def plain(logprobs: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's form of prompt_logprobs: for each token {id: {logprob, rank, decoded_token}}."""
    if logprobs is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": max(entry.logprob, _LEAST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in logprobs
    ]
