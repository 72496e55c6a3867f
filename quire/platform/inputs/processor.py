"""From what a caller gives to a `Request`: prompts in their accepted forms, checked against every limit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.errors import ContextLengthError, RequestError
from quire.multimodal import ProcessedImage, check_count, expand, read_images
from quire.platform.inputs.prepared import PreparedRequest, ProcessedPrompt
from quire.platform.inputs.tokenizer import encode_bad_words, encode_prompt
from quire.platform.kv.prefix_index import root_key
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.sampling.logits_processors import (
    Plugin,
    ProcessorRequest,
    build_chain,
    check_arguments,
    check_beams,
)
from quire.platform.sampling.logits_processors.chain import Chain
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.scheduling.beam import BeamGroup
from quire.platform.scheduling.metrics import RequestMetrics
from quire.platform.scheduling.request import MediaInput, Request
from quire.types import PlaceholderRange

# A text; token ids; or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt", "multi_modal_data" and
# "mm_processor_kwargs".
PromptType = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs"}


@dataclass(frozen=True)
class Limits:
    """What the loaded model and its pool can take."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int
    max_logprobs: int
    rope_threshold: int | None
    crosses_threshold: bool = True


@dataclass(frozen=True)
class ImageInputSpec:
    """What must be known to take images.

    marker_id, marker: the token that stands where an image does, and its text. max_images: of a prompt.
    max_tokens: of one image, that the features' budget can hold. settings: checks what a caller asks of the image
    processor. rotary_positions: for models with `mrope`.
    """

    marker_id: int
    marker: str | None
    max_images: int
    max_tokens: int
    settings: Callable[[Mapping[str, Any] | None], Mapping[str, Any]]
    rotary_positions: Callable[[int, Sequence[PlaceholderRange]], np.ndarray] | None


class InputProcessor:
    """Makes requests. Whatever is wrong with one is a RequestError, raised before anything was queued."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Any,
        eos_ids: frozenset[int],
        seed: int | None,
        image_spec: ImageInputSpec | None = None,
        plugins: Sequence[Plugin] = (),
    ) -> None:
        self.limits = limits
        self.plugins = plugins
        self.image_spec = image_spec
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._random = random.Random(seed)

    def read(self, request_id: str, prompt: PromptType, params: SamplingParams | BeamSearchParams) -> ProcessedPrompt:
        """Check all of a request that can be checked at once."""
        if not isinstance(params, BeamSearchParams):
            self._check_params(request_id, params)
        read = self._read_prompt(request_id, prompt)
        self._max_tokens(request_id, len(read.ids), params.max_tokens)
        if isinstance(params, BeamSearchParams):
            check_beams(self.plugins)
            return read
        unscored = self.image_spec is not None and read.images and self.image_spec.marker_id >= self.limits.vocab_size
        if unscored and params.prompt_logprobs is not None:  # what the request's making would find out too late
            raise RequestError(f"request {request_id}: this model's image placeholders have no prompt_logprobs")
        processors = self._processors(request_id, params, read.ids)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        stops = StopStrings(params.stop) if params.stop else None
        return replace(read, seed=seed, processors=processors, stops=stops)

    def _processors(self, request_id: str, params: SamplingParams, ids: list[int]) -> Chain:
        """What changes the request's logits. Long lists take their time: here no step waits for it."""
        bad_words = encode_bad_words(self.tokenizer, params.bad_words or ())
        size, stop_ids = self.limits.vocab_size, self._stop_ids(params)
        try:
            check_arguments(params, self.plugins)
            return build_chain(ProcessorRequest(params, ids, size, self.tokenizer, stop_ids, bad_words), self.plugins)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return (frozenset() if params.ignore_eos else self.eos_ids) | frozenset(params.stop_token_ids or ())

    def room(self, prompt: ProcessedPrompt) -> int:
        """How many tokens the images of a prompt may take together."""
        assert self.image_spec is not None
        return self.limits.max_model_len - len(prompt.ids) + prompt.ids.count(self.image_spec.marker_id)

    def unserved(self, prepared: PreparedRequest) -> Request:
        """What stands for a request whose images turn out to be no good."""
        params, none = prepared.params, frozenset[int]()
        return Request(
            prompt_ids=prepared.prompt.ids,
            params=SamplingParams() if isinstance(params, BeamSearchParams) else params,
            max_tokens=1,
            seeds=(0,),
            eos_ids=none,
            stop_ids=none,
            prefix_root=b"",
            beam=BeamGroup(params, 1, self.eos_ids) if isinstance(params, BeamSearchParams) else None,
            **self._origin(prepared),
        )

    def request(self, prepared: PreparedRequest, images: Sequence[ProcessedImage] = ()) -> Request:
        """The request of a prompt that `read` has returned, with its images prepared. Raises RequestError."""
        request_id, prompt, params = prepared.request_id, prepared.prompt, prepared.params
        ids: list[int] = prompt.ids
        items: list[PlaceholderRange] = []
        if images:
            ids, items = self._place(request_id, prompt, images)
        given = self._origin(prepared)
        given["prompt_ids"], given["prefix_root"] = ids, self._prefix_root(len(ids), prompt)
        given["max_tokens"] = self._max_tokens(request_id, len(ids), params.max_tokens)
        given["media"] = [
            MediaInput(item, image.pixels, image.source, prompt.settings)
            for item, image in zip(items, images, strict=True)
        ]
        if items and self.image_spec is not None and self.image_spec.rotary_positions is not None:
            given["rotary"] = self.image_spec.rotary_positions(len(ids), items)
            given["rotary_end"] = int(given["rotary"].max()) + 1
        if isinstance(params, BeamSearchParams):
            return self._beam_request(params, given)
        return self._sampling_request(prompt, params, given)

    def _origin(self, prepared: PreparedRequest) -> dict[str, Any]:
        """The fields of a Request that do not depend on its images."""
        prompt = prepared.prompt
        return {
            "request_id": prepared.request_id,
            "prompt": prompt.text,
            "salt": prompt.salt,
            "adapters": prompt.adapters,
            "lora": prompt.lora,
            "arrival": prepared.serial,
            "metrics": RequestMetrics(arrival_time=prepared.time),
        }

    def _place(
        self, request_id: str, prompt: ProcessedPrompt, images: Sequence[ProcessedImage]
    ) -> tuple[list[int], list[PlaceholderRange]]:
        """The prompt's ids with all placeholders, and where they are."""
        assert self.image_spec is not None
        for number, image in enumerate(images):
            if image.layout.features > self.image_spec.max_tokens:
                raise RequestError(
                    f"request {request_id}: image {number} takes {image.layout.features} tokens, and the features of "
                    f"{self.image_spec.max_tokens} fit the budget: scale it down, or raise media_cache_bytes"
                )
            if image.layout.grid is None and self.image_spec.rotary_positions is not None:
                raise RequestError(
                    f"request {request_id}: image {number}: this model's image_embeds need image_grid_thw"
                )
        return expand(prompt.ids, images, self.image_spec.marker_id)

    def _check_params(self, request_id: str, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"request {request_id}: sampling_params must be SamplingParams, not {params!r}")
        params.validate_for(self.limits.vocab_size, max_logprobs=self.limits.max_logprobs)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError(
                f"request {request_id}: stop and bad_words are texts, and no tokenizer is loaded; "
                "use stop_token_ids, or load one."
            )

    def _sampling_request(self, prompt: ProcessedPrompt, params: SamplingParams, given: dict[str, Any]) -> Request:
        return Request(
            params=params,
            seeds=tuple(_mix(prompt.seed, index) for index in range(1 if params.greedy else params.n)),
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            stop_ids=self._stop_ids(params),
            processors=prompt.processors,
            **given,
        )

    def _beam_request(self, params: BeamSearchParams, given: dict[str, Any]) -> Request:
        """Sampled greedily, with the logprobs that the search chooses from."""
        candidates = min(2 * params.beam_width, self.limits.vocab_size)
        sampling = SamplingParams(
            temperature=0.0, logprobs=candidates, max_tokens=params.max_tokens, ignore_eos=True, detokenize=False
        )
        return Request(
            params=sampling,
            seeds=(0,),
            eos_ids=frozenset(),
            stop_ids=frozenset(),
            beam=BeamGroup(params, given["max_tokens"], self.eos_ids),
            **given,
        )

    def _read_prompt(self, request_id: str, prompt: PromptType) -> ProcessedPrompt:
        salt: str | None = None
        images: list[Any] = []
        settings: Mapping[str, Any] = {}
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or ("prompt" in prompt) + ("prompt_token_ids" in prompt) == 0:
                raise RequestError(
                    f"request {request_id}: a prompt dict takes 'prompt' or 'prompt_token_ids', and 'cache_salt', "
                    f"'multi_modal_data', 'mm_processor_kwargs'; it has {sorted(map(str, prompt))}"
                )
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise RequestError(f"request {request_id}: cache_salt must be a non-empty string")
            text = prompt.get("prompt")
            given = prompt["prompt_token_ids"] if prompt.get("prompt_token_ids") is not None else text
            text = text if isinstance(text, str) else None
            images, settings = self._read_media(request_id, prompt)
        else:
            given, text = prompt, prompt if isinstance(prompt, str) else None
        ids = self._encode(request_id, given) if isinstance(given, str) else self._check_ids(request_id, given)
        if not ids:
            raise RequestError(f"request {request_id}: the prompt is empty; it must have at least one token")
        self._check_markers(request_id, ids, len(images), exactly=isinstance(given, str))
        return ProcessedPrompt(text, ids, salt, images, settings)

    def _read_media(self, request_id: str, prompt: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
        """(sources of images, settings of their processor)"""
        data, settings = prompt.get("multi_modal_data"), prompt.get("mm_processor_kwargs")
        if self.image_spec is None:
            if data or settings:
                raise RequestError(f"request {request_id}: multi_modal_data was given, and this model takes text only")
            return [], {}
        try:
            return read_images(data, self.image_spec.max_images), self.image_spec.settings(settings)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    def _check_markers(self, request_id: str, ids: list[int], images: int, exactly: bool) -> None:
        """One for each image; ids that a caller made may have all placeholders already."""
        if self.image_spec is None:
            return
        markers = ids.count(self.image_spec.marker_id)
        if exactly or markers < images or not images:
            try:
                check_count(markers, images)
            except RequestError as error:
                raise RequestError(f"request {request_id}: {error}") from None

    def _encode(self, request_id: str, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(f"request {request_id}: no tokenizer is loaded, so a prompt must be token ids, not text")
        ids = encode_prompt(self.tokenizer, text)
        most = max((token for token in ids if self.image_spec is None or token != self.image_spec.marker_id), default=0)
        if most >= self.limits.vocab_size:
            raise RequestError(
                f"request {request_id}: the tokenizer makes token {most} of this text, and the model's vocabulary "
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
            marker = self.image_spec is not None and token == self.image_spec.marker_id
            if type(token) is not int or not (0 <= token < self.limits.vocab_size or marker):
                raise RequestError(
                    f"request {request_id}: prompt token {place} is {token!r}; "
                    f"token ids are integers from 0 to {self.limits.vocab_size - 1}"
                )
        return ids

    def _max_tokens(self, request_id: str, prompt_len: int, wanted: int | None) -> int:
        """How many tokens the request may produce; RequestError if it can never fit."""
        limits = self.limits
        if prompt_len >= limits.max_model_len:
            raise ContextLengthError(limits.max_model_len, prompt_len, request_id=request_id)
        if prompt_len > limits.pool_tokens:
            why = f" here, by the KV pool of {limits.pool_tokens} tokens (kv_cache_memory_bytes)"
            raise ContextLengthError(limits.pool_tokens, prompt_len, request_id=request_id, why=why)
        longest = limits.max_model_len - prompt_len
        if limits.rope_threshold is not None and prompt_len <= limits.rope_threshold and not limits.crosses_threshold:
            longest = min(longest, limits.rope_threshold - prompt_len + 1)  # the last token is not fed back
        # The last token is never fed back, so it takes no slot.
        room = limits.pool_tokens - prompt_len + 1
        count = min(longest, wanted) if wanted is not None else max(min(longest, room), 1)
        if count > room:
            raise RequestError(
                f"request {request_id}: {prompt_len} prompt tokens and {count} output tokens can never fit the KV pool "
                f"of {limits.pool_tokens} tokens: lower max_tokens, or raise kv_cache_memory_bytes."
            )
        return count

    def _prefix_root(self, prompt_len: int, prompt: ProcessedPrompt) -> bytes:
        # Past the threshold, keys are rotated by frequencies that depend on the prompt's length.
        threshold = self.limits.rope_threshold
        rope_length = prompt_len if threshold is not None and prompt_len > threshold else None
        return root_key(prompt.salt, rope_length, prompt.adapters)


def _mix(seed: int, index: int) -> int:
    """Independent seeds for the n sequences of one request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
