"""From what a caller gives to a `Request`: prompts in their accepted forms, checked against every limit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.platform.beam import BeamGroup
from quire.platform.prefix_index import root_key
from quire.platform.request import Request
from quire.platform.sampling_params import BeamSearchParams, SamplingParams
from quire.platform.tokenizer import encode_bad_words, encode_prompt

# A text; token ids; or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt".
PromptType = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class Limits:
    """What the loaded model and its pool can take."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    max_logprobs: int
    rope_threshold: int | None


class Intake:
    """Makes requests. Whatever is wrong with one is a RequestError, raised before anything was queued."""

    def __init__(self, limits: Limits, tokenizer: Any, eos_ids: frozenset[int], seed: int | None) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._random = random.Random(seed)

    def request(self, request_id: str, prompt: PromptType, params: SamplingParams) -> Request:
        """A request to sample by `params`."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"request {request_id}: sampling_params must be SamplingParams, not {params!r}")
        params.validate_for(self.limits.vocab_size, max_logprobs=self.limits.max_logprobs)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                f"request {request_id}: stop and bad_words are texts, and no tokenizer is loaded; "
                "use stop_token_ids, or load one."
            )
        text, ids, salt = self._read_prompt(request_id, prompt)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_ids=ids,
            params=params,
            max_tokens=self._max_tokens(request_id, len(ids), params.max_tokens),
            seeds=tuple(_mix(seed, index) for index in range(params.n)),
            eos_ids=eos_ids,
            stop_ids=eos_ids | frozenset(params.stop_token_ids or ()),
            bad_words=encode_bad_words(self.tokenizer, params.bad_words or ()),
            prefix_root=self._prefix_root(len(ids), salt),
        )

    def beam_request(self, request_id: str, prompt: PromptType, params: BeamSearchParams) -> Request:
        """A request to search beams: sampled greedily, with the logprobs that the search chooses from."""
        candidates = min(2 * params.beam_width, self.limits.vocab_size)
        sampling = SamplingParams(
            temperature=0.0, logprobs=candidates, max_tokens=params.max_tokens, ignore_eos=True, detokenize=False
        )
        text, ids, salt = self._read_prompt(request_id, prompt)
        max_tokens = self._max_tokens(request_id, len(ids), params.max_tokens)
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_ids=ids,
            params=sampling,
            max_tokens=max_tokens,
            seeds=(0,),
            eos_ids=frozenset(),
            stop_ids=frozenset(),
            bad_words=(),
            prefix_root=self._prefix_root(len(ids), salt),
            beam=BeamGroup(params, max_tokens, self.eos_ids),
        )

    def _read_prompt(self, request_id: str, prompt: PromptType) -> tuple[str | None, list[int], str | None]:
        """(text if one was given, token ids, cache salt)"""
        salt = None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or ("prompt" in prompt) + ("prompt_token_ids" in prompt) == 0:
                raise RequestError(
                    f"request {request_id}: a prompt dict takes 'prompt' or 'prompt_token_ids', and 'cache_salt'; "
                    f"it has {sorted(map(str, prompt))}"
                )
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise RequestError(f"request {request_id}: cache_salt must be a non-empty string")
            text = prompt.get("prompt")
            given = prompt["prompt_token_ids"] if prompt.get("prompt_token_ids") is not None else text
            text = text if isinstance(text, str) else None
        else:
            given, text = prompt, prompt if isinstance(prompt, str) else None
        ids = self._encode(request_id, given) if isinstance(given, str) else self._check_ids(request_id, given)
        if not ids:
            raise RequestError(f"request {request_id}: the prompt is empty; it must have at least one token")
        return text, ids, salt

    def _encode(self, request_id: str, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(f"request {request_id}: no tokenizer is loaded, so a prompt must be token ids, not text")
        ids = encode_prompt(self.tokenizer, text)
        if ids and max(ids) >= self.limits.vocab_size:
            raise RequestError(
                f"request {request_id}: the tokenizer makes token {max(ids)} of this text, and the model's vocabulary "
                f"ends at {self.limits.vocab_size - 1}: tokenizer and model do not belong together."
            )
        return ids

    def _check_ids(self, request_id: str, ids: Any) -> list[int]:
        if isinstance(ids, (bytes, bytearray)) or not (isinstance(ids, Sequence) or hasattr(ids, "tolist")):
            raise RequestError(
                f"request {request_id}: a prompt is a text, a list of token ids or a dict, not {type(ids).__name__}"
            )
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not isinstance(ids, list):
            raise RequestError(f"request {request_id}: a prompt's token ids are one-dimensional, not a single {ids!r}")
        for place, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self.limits.vocab_size:
                raise RequestError(
                    f"request {request_id}: prompt token {place} is {token!r}; "
                    f"token ids are integers from 0 to {self.limits.vocab_size - 1}"
                )
        return ids

    def _max_tokens(self, request_id: str, prompt_len: int, wanted: int | None) -> int:
        """How many tokens the request may produce; RequestError if it can never fit."""
        limits = self.limits
        if prompt_len >= limits.max_model_len:
            raise RequestError(
                f"request {request_id}: the prompt has {prompt_len} tokens, and max_model_len={limits.max_model_len} "
                "holds prompt and output together: shorten the prompt."
            )
        longest = limits.max_model_len - prompt_len
        # The last token is never fed back, so it takes no slot.
        room = limits.pool_tokens - prompt_len + 1
        count = min(longest, wanted) if wanted is not None else max(min(longest, room), 1)
        if count > room:
            raise RequestError(
                f"request {request_id}: {prompt_len} prompt tokens and {count} output tokens can never fit the KV pool "
                f"of {limits.pool_tokens} tokens: lower max_tokens, or raise kv_cache_memory_bytes."
            )
        return count

    def _prefix_root(self, prompt_len: int, salt: str | None) -> bytes:
        # Past the threshold, keys are rotated by frequencies that depend on the prompt's length.
        threshold = self.limits.rope_threshold
        return root_key(salt, prompt_len if threshold is not None and prompt_len > threshold else None)


def _mix(seed: int, index: int) -> int:
    """Independent seeds for the n sequences of one request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
