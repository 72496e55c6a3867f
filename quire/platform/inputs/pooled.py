"""Prompts whose hidden states are pooled: texts and pairs of texts, cut where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import CheckpointError, RequestError
from quire.platform.inputs.limits import Limits
from quire.platform.inputs.plain_tokenizer import encoded
from quire.platform.pooling.params import PoolingParams
from quire.platform.sampling.params import RequestOutputKind, SamplingParams
from quire.platform.scheduling.request import Request
from quire.pooling_types import PoolingInput, PoolingSpec, TowerPrompts

_PROMPTS = {"prompt", "prompt_token_ids", "prompt_embeds", "multi_modal_data"}
# Nothing is sampled; a request has parameters all the same.
_NO_TOKENS = SamplingParams(
    temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)

# Why a request of the other kind is refused.
POOLS = (
    "this model makes vectors, classes or scores of prompts (runner='pooling') and generates nothing: call embed, "
    "classify, score, reward or encode with PoolingParams; a decoder generates with runner='generate'"
)
GENERATES = (
    "this model was loaded to generate: load it with runner='pooling' (and convert='embed') to have vectors of its "
    "hidden states"
)


class PooledPrompts:
    """Reads prompts for a model that generates nothing."""

    def __init__(self, spec: PoolingSpec, limits: Limits, tokenizer: Any) -> None:
        self.spec = spec
        self._limits = limits
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # transformers tells a model of types only where the tokenizer's configuration lists them.
        self._types = spec.token_types and "token_type_ids" in getattr(tokenizer, "model_input_names", ())
        self._towers = None if spec.towers is None else _with_padding(spec.towers, tokenizer)
        if self._backend is not None:  # files of sentence-transformers cut and pad, which nobody is told of
            self._backend.no_truncation()
            self._backend.no_padding()
            if spec.lower_case:
                _make_lower(self._backend)
        elif spec.lower_case and tokenizer is not None:
            raise CheckpointError("do_lower_case: texts are made lower case by a fast tokenizer, and none is loaded.")

    def read(self, request_id: str, prompt: Any, params: PoolingParams) -> tuple[Any, PoolingInput]:
        """(a prompt as generators take it, with its text made tokens; what is to be made of it).

        prompt: as generators take it, or {"prompt_pair": (text, text)}, two texts that are scored together.
        Raises RequestError.
        """
        try:
            pooling = params.resolve(self.spec)
            most = self._most(params)
            if isinstance(prompt, Mapping) and "prompt_pair" in prompt:
                if self._prompt_before(params):
                    raise RequestError("prompt_name: nothing is put before two texts that are scored together")
                ids, second = self._pair(prompt["prompt_pair"], most)
                beside = sorted(_PROMPTS & prompt.keys())
                if beside:
                    raise RequestError(f"prompt_pair: takes no other prompt beside it, and there is {beside[0]}")
                others = {name: value for name, value in prompt.items() if name != "prompt_pair"}
                return {**others, "prompt_token_ids": ids}, pooling._replace(second=second)
            return self._single(prompt, params, most), pooling
        except RequestError as error:
            raise RequestError(f"request {request_id}: {error}") from None

    def kept(self, request_id: str, ids: list[int], pooling: PoolingInput) -> list[int]:
        """A prompt's tokens without the padding at its end, where its last token's row is told; one is left. With the
        padding that the model knows texts with, and without what is behind a text's end, where it has a tower for them.

        Raises RequestError for a text without its end.
        """
        if self._towers is not None and ids != [self._towers.image]:
            try:
                return _text_of_tower(ids, self._towers)
            except RequestError as error:
                raise RequestError(f"request {request_id}: {error}") from None
        end = len(ids)
        if self.spec.trailing_padding is not None and pooling.kind == "last":
            while end > 1 and ids[end - 1] == self.spec.trailing_padding:
                end -= 1
        return ids[:end]

    def request(self, pooling: PoolingInput, given: dict[str, Any]) -> Request:
        """A request that generates nothing. given: fields of `Request` that any has."""
        if self.spec.bidirectional:
            given["sees"] = ((0, len(given["prompt_ids"])),)
        return Request(
            params=_NO_TOKENS,
            max_tokens=1,
            seeds=(0,),
            eos_ids=frozenset(),
            stop_ids=frozenset(),
            pooling=pooling,
            **given,
        )

    def _most(self, params: PoolingParams) -> int | None:
        """Tokens to which a prompt is cut."""
        wanted = params.truncate_prompt_tokens
        if wanted is not None and wanted > self._limits.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens={wanted}: this model takes {self._limits.max_model_len} tokens at most"
            )
        return self._limits.max_model_len if wanted == -1 else wanted

    def _single(self, prompt: Any, params: PoolingParams, most: int | None) -> Any:
        given = dict(prompt) if isinstance(prompt, Mapping) else None
        placeholder = None if self._towers is None else self._towers.image
        if placeholder is not None and given is not None and given.get("multi_modal_data"):
            return self._image(given, placeholder, params)
        text = prompt if given is None else given.get("prompt")
        ids = None if given is None else given.get("prompt_token_ids")
        before = self._prompt_before(params)
        if ids is None and isinstance(text, str):
            text = before + text
            if given is not None and (given.get("multi_modal_data") or given.get("prompt_embeds") is not None):
                if most is not None:
                    raise RequestError("truncate_prompt_tokens: a prompt with images is not cut; make it shorter")
                return {**given, "prompt": text}
            if most is None:
                return text if given is None else {**given, "prompt": text}
            return {**(given or {}), "prompt": text, "prompt_token_ids": self._encode(text, None, most)[0]}
        if params.prompt_name:
            raise RequestError("prompt_name: a prompt of token ids has no text to put something before")
        if most is None:
            return prompt
        cut = _cut(prompt if given is None else ids, most)
        return cut if given is None else {**given, "prompt_token_ids": cut}

    def _image(self, given: dict[str, Any], placeholder: int, params: PoolingParams) -> dict[str, Any]:
        """The prompt of an image that is alone in it."""
        if given.get("prompt") or list(given.get("prompt_token_ids") or ()) not in ([], [placeholder]):
            raise RequestError(
                "multi_modal_data: this model makes a vector of a text or of an image, and the prompt has both: give "
                "each as a prompt of its own, the image's as {'prompt': '', 'multi_modal_data': {'image': ...}}"
            )
        images = given["multi_modal_data"].get("image") if isinstance(given["multi_modal_data"], Mapping) else None
        if isinstance(images, (list, tuple)) and len(images) != 1:
            raise RequestError(
                f"multi_modal_data: a vector is of one image, and the prompt has {len(images)}: give each as a prompt "
                "of its own"
            )
        if params.truncate_prompt_tokens is not None or params.prompt_name:
            raise RequestError("truncate_prompt_tokens and prompt_name are for texts, and this prompt is an image")
        return {**given, "prompt": "", "prompt_token_ids": [placeholder]}

    def _prompt_before(self, params: PoolingParams) -> str:
        name = self.spec.default_prompt if params.prompt_name is None else params.prompt_name
        if not name:
            return ""
        if name not in self.spec.prompts:
            known = ", ".join(sorted(self.spec.prompts)) or "none"
            raise RequestError(f"prompt_name={name!r}: this checkpoint's prompts are: {known}")
        return self.spec.prompts[name]

    def _pair(self, pair: Any, most: int | None) -> tuple[list[int], int]:
        """(token ids of two texts as the tokenizer joins them, position of the second's first token)"""
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RequestError("prompt_pair: must be two texts")
        first, second = pair
        ids, kinds = self._encode(first, second, most)
        if not self._types:
            return ids, 0
        start = kinds.index(1) if 1 in kinds else 0
        if start and kinds != [0] * start + [1] * (len(kinds) - start):
            raise RequestError("prompt_pair: the tokenizer mixes the types of the two texts' tokens")
        return ids, start

    def _encode(self, text: str, pair: str | None, most: int | None) -> tuple[list[int], list[int]]:
        """(ids, types of tokens), cut with the special tokens kept: of two texts, the longer one loses first.

        By the tokenizers library's own object, whose settings are left alone: other threads use it.
        """
        if self._backend is None:
            raise RequestError("texts are cut and joined by a fast tokenizer (tokenizer.json), and none is loaded")
        texts = [text] if pair is None else [text, pair]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: character {error.start} is a lone surrogate") from error
        parts = [encoded(self._backend, one, add_special_tokens=False) for one in texts]
        if most is not None:
            room = most - self._backend.num_special_tokens_to_add(pair is not None)
            if room < len(texts):
                raise RequestError(f"truncate_prompt_tokens={most}: leaves no room beside the special tokens")
            for part, length in zip(parts, _shares([len(part.ids) for part in parts], room), strict=True):
                part.truncate(length)
        made = self._backend.post_process(*parts)
        return list(made.ids), list(made.type_ids)


def _with_padding(towers: TowerPrompts, tokenizer: Any) -> TowerPrompts:
    """With the tokenizer's token and length, as `padding="max_length"` has them, where one is loaded."""
    if not towers.length:
        return towers
    padding, most = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "model_max_length", None)
    padding = towers.padding if padding is None else padding
    if type(padding) is not int:
        raise CheckpointError("texts of this model are padded, and neither its tokenizer nor config.json says by what.")
    length = min(towers.length, most) if type(most) is int and most > 0 else towers.length
    return towers._replace(length=length, padding=padding)


def _text_of_tower(ids: list[int], towers: TowerPrompts) -> list[int]:
    """A text's tokens up to the one whose row is its vector. Raises RequestError where it has none."""
    if towers.length:
        assert towers.padding is not None
        if len(ids) > towers.length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and texts of this model are padded to {towers.length}: set "
                "truncate_prompt_tokens"
            )
        return ids + [towers.padding] * (towers.length - len(ids))
    end = max(ids) if towers.end == "highest" else towers.end
    if end not in ids:
        raise RequestError(f"the prompt has no token {end}, which ends a text: its row is the text's vector")
    return ids[: ids.index(end) + 1]


def _make_lower(backend: Any) -> None:
    """Let a tokenizer make texts lower case first, as sentence-transformers does; special tokens are found before."""
    from tokenizers import normalizers

    own = backend.normalizer
    lower = normalizers.Lowercase()
    backend.normalizer = lower if own is None else normalizers.Sequence([lower, own])


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens of each text stay, as transformers' "longest_first" has it: the longer one loses its last ones
    until both have as many; then both do, and the one that was longer keeps one more."""
    kept = list(lengths)
    if len(kept) == 1:
        return [min(kept[0], room)]
    over = max(0, sum(kept) - room)
    longer, shorter = (0, 1) if kept[0] > kept[1] else (1, 0)
    alone = min(over, kept[longer] - kept[shorter])
    kept[longer] -= alone
    over -= alone
    kept[longer] -= over // 2
    kept[shorter] -= (over + 1) // 2
    return kept


def _cut(ids: Any, most: int) -> Any:
    try:
        return ids[:most]
    except TypeError:
        return ids  # which is refused by its own reason
