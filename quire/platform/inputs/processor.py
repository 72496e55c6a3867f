"""From what a caller gives to a `Request`: prompts in their accepted forms, checked against every limit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.multimodal import (
    ProcessedImage,
    RowsSpec,
    expand,
    kind_of,
    read_media,
    with_uuids,
)
from quire.platform.inputs.embeds import media_of, read_embeds
from quire.platform.inputs.image_spec import ImageInputSpec
from quire.platform.inputs.limits import Limits
from quire.platform.inputs.markers import check_markers
from quire.platform.inputs.plain_tokenizer import full_tokenizer
from quire.platform.inputs.pooled import GENERATES, POOLS, PooledPrompts
from quire.platform.inputs.prepared import Params, PreparedRequest, ProcessedPrompt
from quire.platform.inputs.token_ids import check_ids
from quire.platform.inputs.tokenizer import encode_bad_words, encode_prompt, encode_rendered
from quire.platform.kv.prefix_index import root_key
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.pooling.params import PoolingParams
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
from quire.pooling_types import PoolingSpec
from quire.types import MEDIA_KINDS, PlaceholderRange

if TYPE_CHECKING:
    from quire.platform.sampling.structured.compiler import ConstraintCompiler, RemoteGrammars

# A text; token ids; or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt", "multi_modal_data" and
# "mm_processor_kwargs"; or one with "prompt_embeds", and optionally "prompt", the text to show for it, and
# "cache_salt".
PromptType = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = {
    "prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "multi_modal_data", "multi_modal_uuids",
    "mm_processor_kwargs",
}  # fmt: skip


class InputProcessor:
    """Makes requests. Whatever is wrong with one is a RequestError, raised before anything was queued.

    rows_spec: what prompts as embeddings must be; None: they are not served. pooling: what the model makes of prompts;
    None: it generates.
    """

    def __init__(
        self,
        limits: Limits,
        tokenizer: Any,
        eos_ids: frozenset[int],
        seed: int | None,
        image_spec: ImageInputSpec | None = None,
        plugins: Sequence[Plugin] = (),
        remote: RemoteGrammars | None = None,
        rows_spec: RowsSpec | None = None,
        pooling: PoolingSpec | None = None,
    ) -> None:
        self.limits = limits
        self.pooled = None if pooling is None else PooledPrompts(pooling, limits, tokenizer)
        self.plugins = plugins
        self.image_spec = image_spec
        self.rows_spec = rows_spec
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._random = random.Random(seed)
        self._remote = remote

    def read(self, request_id: str, prompt: PromptType, params: Params) -> ProcessedPrompt:
        """Check all of a request that can be checked at once."""
        if isinstance(params, PoolingParams) or self.pooled is not None:
            return self._read_pooled(request_id, prompt, params)
        if not isinstance(params, BeamSearchParams):
            self._check_params(request_id, params)
        read = self._read_prompt(request_id, prompt)
        if self.image_spec is not None and self.image_spec.prompt_sees and not read.images:
            raise RequestError(
                f"request {request_id}: all tokens of this model's prompts see one another, with an image among them: "
                "give one"
            )
        self.limits.max_tokens(request_id, len(read.ids), params.max_tokens)
        if isinstance(params, BeamSearchParams):
            check_beams(self.plugins)
            sampling = self._beam_params(params)
            if sampling.structured_outputs is None:
                return read
            return replace(read, processors=self._processors(request_id, sampling, read, self.eos_ids))
        if read.embeds is not None and params.prompt_logprobs is not None:
            raise RequestError(
                f"request {request_id}: prompt_logprobs: a prompt of embeddings has no tokens that could have logprobs"
            )
        spec = self.image_spec
        stand_ins = {*spec.placeholders, spec.marker_id or 0} if spec else {0}
        unscored = read.images and max(stand_ins) >= self.limits.vocab_size
        if unscored and params.prompt_logprobs is not None:  # what the request's making would find out too late
            raise RequestError(f"request {request_id}: this model's image placeholders have no prompt_logprobs")
        processors = self._processors(request_id, params, read, self._stop_ids(params))
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        stops = StopStrings(params.stop) if params.stop else None
        return replace(read, seed=seed, processors=processors, stops=stops)

    def _read_pooled(self, request_id: str, prompt: PromptType, params: Params) -> ProcessedPrompt:
        if self.pooled is None or not isinstance(params, PoolingParams):
            raise RequestError(f"request {request_id}: {GENERATES if self.pooled is None else POOLS}")
        prompt, pooling = self.pooled.read(request_id, prompt, params)
        read = self._read_prompt(request_id, prompt)
        if not read.images:
            self.limits.check_pooled(request_id, len(read.ids))
        return replace(read, ids=self.pooled.kept(request_id, read.ids, pooling), pooling=pooling)

    def _processors(
        self, request_id: str, params: SamplingParams, read: ProcessedPrompt, stop_ids: frozenset[int]
    ) -> Chain:
        """What changes the request's logits. Long lists take their time: here no step waits for it."""
        ids = [] if read.embeds is not None else read.ids  # penalties count tokens, and rows are none
        bad_words = encode_bad_words(self.tokenizer, params.bad_words or ())
        size = self.limits.vocab_size
        try:
            check_arguments(params, self.plugins)
            shaped = params.structured_outputs is not None or params.thinking_token_budget is not None
            shapes = self._constraints.processors(params, stop_ids) if shaped else ()
            tokenizer = (
                full_tokenizer(self.tokenizer) if self.plugins else self.tokenizer
            )  # plug-ins get Hugging Face's
            request = ProcessorRequest(params, ids, size, tokenizer, stop_ids, bad_words)
            return build_chain(request, self.plugins, shapes)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    @cached_property
    def _constraints(self) -> ConstraintCompiler:
        """Made for the first request that wants it: most engines never need its library."""
        from quire.platform.sampling.structured.compiler import ConstraintCompiler

        never = tuple(self._placeholders)
        return ConstraintCompiler(self.tokenizer, self.limits.vocab_size, self.eos_ids, never, self._remote)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return (frozenset() if params.ignore_eos else self.eos_ids) | frozenset(params.stop_token_ids or ())

    def room(self, prompt: ProcessedPrompt) -> int:
        """How many tokens the images of a prompt may take together."""
        assert self.image_spec is not None
        own = {self.image_spec.markers[kind_of(source)] for source in prompt.images} | self.image_spec.placeholders
        return self.limits.max_model_len - len(prompt.ids) + sum(map(prompt.ids.count, own))

    def unserved(self, prepared: PreparedRequest) -> Request:
        """What stands for a request whose images turn out to be no good."""
        params, none = prepared.params, frozenset[int]()
        return Request(
            prompt_ids=prepared.prompt.ids,
            params=params if isinstance(params, SamplingParams) else SamplingParams(),
            max_tokens=1,
            seeds=(0,),
            eos_ids=none,
            stop_ids=none,
            prefix_root=b"",
            beam=BeamGroup(params, 1, self.eos_ids) if isinstance(params, BeamSearchParams) else None,
            pooling=prepared.prompt.pooling,
            **self._origin(prepared),
        )

    def request(self, prepared: PreparedRequest, images: Sequence[ProcessedImage] = ()) -> Request:
        """The request of a prompt that `read` has returned, with its images prepared. Raises RequestError."""
        request_id, prompt, params = prepared.request_id, prepared.prompt, prepared.params
        ids: list[int] = prompt.ids
        placed: list[tuple[ProcessedImage, PlaceholderRange]] = []
        if images:
            ids, placed = self._place(request_id, prompt, images)
        given = self._origin(prepared)
        given["prompt_ids"], given["prefix_root"] = ids, self._prefix_root(len(ids), prompt)
        if isinstance(params, PoolingParams):
            self.limits.check_pooled(request_id, len(ids))
        else:
            given["max_tokens"] = self.limits.max_tokens(request_id, len(ids), params.max_tokens)
        given["media"] = [MediaInput(item, image.pixels, image.source, prompt.settings) for image, item in placed]
        if prompt.embeds is not None:
            given["media"] = media_of(prompt.embeds)
        elif placed:
            given |= self._of_media(request_id, prompt, ids, [item for _, item in placed])
        if isinstance(params, PoolingParams):
            assert self.pooled is not None and prompt.pooling is not None
            return self.pooled.request(prompt.pooling, given)
        if isinstance(params, BeamSearchParams):
            return self._beam_request(params, prompt.processors, given)
        return self._sampling_request(prompt, params, given)

    def _of_media(
        self, request_id: str, prompt: ProcessedPrompt, ids: list[int], items: list[PlaceholderRange]
    ) -> dict[str, Any]:
        """The fields of a Request that depend on what lies where in its prompt."""
        assert self.image_spec is not None
        given: dict[str, Any] = {"sees": self.image_spec.ranges(request_id, len(ids), items)}
        if self.image_spec.rotary_positions is not None:
            # The answer goes on as a text behind the prompt would, which need not be behind all of a video's times.
            positions = self.image_spec.rotary_positions(len(ids) + 1, items)
            given["rotary"], given["rotary_end"] = positions[:, :-1].copy(), int(positions[0, -1])
        if self.image_spec.prompt_sees:
            # Already the first token's keys depend on all of the prompt.
            given["prefix_root"] = self._prefix_root(len(ids), prompt, (ids, items))
        return given

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
    ) -> tuple[list[int], list[tuple[ProcessedImage, PlaceholderRange]]]:
        """The prompt's ids with all placeholders, and where they are."""
        assert self.image_spec is not None
        numbers = dict.fromkeys(MEDIA_KINDS, 0)
        for image in images:
            number, numbers[image.kind] = numbers[image.kind], numbers[image.kind] + 1
            if image.layout.features > self.image_spec.max_tokens:
                raise RequestError(
                    f"request {request_id}: {image.kind} {number} takes {image.layout.features} tokens, and the "
                    f"features of {self.image_spec.max_tokens} fit the budget: scale it down, or raise "
                    "media_cache_bytes"
                )
            if image.kind == "image" and image.layout.grid is None and self.image_spec.rotary_positions is not None:
                raise RequestError(
                    f"request {request_id}: image {number}: this model's image_embeds need image_grid_thw"
                )
        return expand(prompt.ids, images, self.image_spec.markers)

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

    def _beam_request(self, params: BeamSearchParams, processors: Chain, given: dict[str, Any]) -> Request:
        return Request(
            params=self._beam_params(params),
            seeds=(0,),
            eos_ids=frozenset(),
            stop_ids=frozenset(),
            beam=BeamGroup(params, given["max_tokens"], self.eos_ids),
            processors=processors,
            **given,
        )

    def _beam_params(self, params: BeamSearchParams) -> SamplingParams:
        """Sampled greedily, with the logprobs that the search chooses from."""
        return SamplingParams(
            temperature=0.0,
            logprobs=min(2 * params.beam_width, self.limits.vocab_size),
            max_tokens=params.max_tokens,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=params.structured_outputs,
        )

    def _read_prompt(self, request_id: str, prompt: PromptType) -> ProcessedPrompt:
        salt = self._salt(request_id, prompt) if isinstance(prompt, Mapping) else None
        images: list[Any] = []
        settings: Mapping[str, Any] = {}
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            return read_embeds(request_id, prompt, self.rows_spec, self.limits, salt)
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or ("prompt" in prompt) + ("prompt_token_ids" in prompt) == 0:
                raise RequestError(
                    f"request {request_id}: a prompt dict takes 'prompt' or 'prompt_token_ids', and 'cache_salt', "
                    f"'multi_modal_data', 'multi_modal_uuids', 'mm_processor_kwargs'; it has {sorted(map(str, prompt))}"
                )
            text = prompt.get("prompt")
            given = prompt["prompt_token_ids"] if prompt.get("prompt_token_ids") is not None else text
            text = text if isinstance(text, str) else None
            images, settings = self._read_media(request_id, prompt)
        else:
            given, text = prompt, prompt if isinstance(prompt, str) else None
        count = sum(kind_of(source) == "image" for source in images)
        ids = (
            self._encode(request_id, given, count)
            if isinstance(given, str)
            else check_ids(request_id, given, self.limits.vocab_size, self._placeholders)
        )
        if not ids:
            raise RequestError(f"request {request_id}: the prompt is empty; it must have at least one token")
        if self.image_spec is not None:
            try:
                check_markers(self.image_spec, ids, images, exactly=isinstance(given, str))
            except RequestError as error:
                raise RequestError(f"request {request_id}: {error}") from None
            ids = ids if isinstance(given, str) else self.image_spec.completed(ids)
        return ProcessedPrompt(text, ids, salt, images, settings)

    def _salt(self, request_id: str, prompt: Mapping[str, Any]) -> str | None:
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(f"request {request_id}: cache_salt must be a non-empty string")
        return salt

    def _read_media(self, request_id: str, prompt: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
        """(sources of images, settings of their processor)"""
        data, settings = prompt.get("multi_modal_data"), prompt.get("mm_processor_kwargs")
        if self.image_spec is None:
            if data or settings or prompt.get("multi_modal_uuids"):
                raise RequestError(f"request {request_id}: multi_modal_data was given, and this model takes text only")
            return [], {}
        try:
            data = with_uuids(data, prompt.get("multi_modal_uuids"))
            return read_media(data, self.image_spec.limits, self.image_spec.markers), self.image_spec.settings(settings)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    @cached_property
    def _placeholders(self) -> frozenset[int]:
        """Of all kinds, with their markers: token ids that a prompt may have, and an answer has not."""
        spec = self.image_spec
        return frozenset() if spec is None else frozenset(spec.markers.values()) | spec.placeholders

    def _encode(self, request_id: str, text: str, images: int) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(f"request {request_id}: no tokenizer is loaded, so a prompt must be token ids, not text")
        spec = self.image_spec
        if spec is not None:
            (text,) = spec.written([text], images)
        ids = self._stretches(request_id, text, images)
        if ids is None:
            whole = spec is not None and spec.lays_out_special
            ids = encode_rendered(self.tokenizer, [text]) if whole else encode_prompt(self.tokenizer, text)
        most = max(ids, default=0)
        if most >= self.limits.vocab_size:
            placeholders = self._placeholders
            most = max((token for token in ids if token not in placeholders), default=0)
        if most >= self.limits.vocab_size:
            raise RequestError(
                f"request {request_id}: the tokenizer makes token {most} of this text, and the model's vocabulary "
                f"ends at {self.limits.vocab_size - 1}: tokenizer and model do not belong together."
            )
        return ids

    def _stretches(self, request_id: str, text: str, images: int) -> list[int] | None:
        """The ids of a text in which images have numbers; None: it has none of them."""
        if self.image_spec is None or self.image_spec.numbered is None:
            return None
        try:
            return self.image_spec.numbered.encode(self.tokenizer, [text], [], images)
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    def _prefix_root(self, prompt_len: int, prompt: ProcessedPrompt, seen: object = None) -> bytes:
        """seen: what the first token of the prompt sees beside itself."""
        # Past the threshold, keys are rotated by frequencies that depend on the prompt's length.
        threshold = self.limits.rope_threshold
        rope_length = prompt_len if threshold is not None and prompt_len > threshold else None
        return root_key(prompt.salt, rope_length, prompt.adapters, seen)


def _mix(seed: int, index: int) -> int:
    """Independent seeds for the n sequences of one request."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
