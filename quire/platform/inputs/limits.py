"""How long prompts and answers may be."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ContextLengthError, RequestError


@dataclass(frozen=True)
class Limits:
    """What the loaded model and its pool can take."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    max_logprobs: int
    rope_threshold: int | None
    crosses_threshold: bool = True

    def max_tokens(self, request_id: str, prompt_len: int, wanted: int | None) -> int:
        """How many tokens a request may produce. Raises RequestError if it can never fit."""
        if prompt_len >= self.max_model_len:
            raise ContextLengthError(self.max_model_len, prompt_len, request_id=request_id)
        self._check_pool(request_id, prompt_len)
        longest = self.max_model_len - prompt_len
        if self.rope_threshold is not None and prompt_len <= self.rope_threshold and not self.crosses_threshold:
            longest = min(longest, self.rope_threshold - prompt_len + 1)  # the last token is not fed back
        # The last token is never fed back, so it takes no slot.
        room = self.pool_tokens - prompt_len + 1
        count = min(longest, wanted) if wanted is not None else max(min(longest, room), 1)
        if count > room:
            raise RequestError(
                f"request {request_id}: {prompt_len} prompt tokens and {count} output tokens can never fit the KV pool "
                f"of {self.pool_tokens} tokens: lower max_tokens, or raise kv_cache_memory_bytes."
            )
        return count

    def check_pooled(self, request_id: str, prompt_len: int) -> None:
        """Raise ContextLengthError for a prompt that can never be computed where nothing follows it."""
        if prompt_len > self.max_model_len:
            hint = ", or set truncate_prompt_tokens (-1: to what the model takes)."
            raise ContextLengthError(self.max_model_len, prompt_len, request_id=request_id, hint=hint)
        self._check_pool(request_id, prompt_len)

    def _check_pool(self, request_id: str, prompt_len: int) -> None:
        if prompt_len > self.pool_tokens:
            why = f" here, by the KV pool of {self.pool_tokens} tokens (kv_cache_memory_bytes)"
            raise ContextLengthError(self.pool_tokens, prompt_len, request_id=request_id, why=why)
