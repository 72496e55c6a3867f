"""The calls of `LLM` for models that make vectors, classes and scores, in the manner of vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

from quire.errors import RequestError
from quire.lora import LoRARequest
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.similarity import comparison
from quire.platform.inputs.batch import one_for_each, prompt_list
from quire.platform.inputs.pooled import GENERATES
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.pooled import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.platform.pooling.params import PoolingParams
from quire.pooling_types import PoolingSpec, PoolingTask

# Arguments of vLLM's calls that are refused, and what there is here.
_INSTEAD = {
    "tokenization_kwargs": "give truncate_prompt_tokens; texts get the special tokens that the model knows them with, "
    "and token ids are taken as they are",
    "chat_template": "texts are taken as they are: put each into its part of the model's template, or give encode the "
    "token ids of what the template makes of both",
}
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
PoolingParamsList = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """What `LLM` has for them; all go through `encode`.

    Texts are taken as they are. Where a model was trained with instructions or templates (Qwen3-Reranker's "<Instruct>:
    ... <Query>: ..." and "<Document>: ...", say), the caller puts each text into its part of them, as with vLLM; of a
    pair the tokenizer puts one text behind the other.

    tokenization_kwargs and chat_template are vLLM's, and refused. Each call raises RequestError for a model that was
    loaded to generate, for a task that the model has not, and for what is wrong with a prompt; nothing is left running.
    An output whose request failed meanwhile (an image that was no good) says so by `failure`, and has no `outputs`.
    """

    llm_engine: LLMEngine
    _adapters_list: Callable[[Adapters, int], list[LoRARequest | None]]
    _run: Callable[..., list[Any]]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParamsList = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What a task makes of each prompt, as a tensor: `outputs.data`, float32, [numbers], or [tokens, numbers] of
        "token_embed" and "token_classify".

        prompts: as `generate` takes them. pooling_params: one for all, or one for each. pooling_task: what is to be
        made; None: as pooling_params say, or else what the model is for. truncate_prompt_tokens: as of PoolingParams.
        """
        _refuse(tokenization_kwargs=tokenization_kwargs)
        batch = prompt_list(prompts)
        params = one_for_each("pooling_params", pooling_params or PoolingParams(), (PoolingParams,), len(batch))
        if pooling_task is not None:
            params = [dataclasses.replace(one, task=pooling_task) for one in params]
        if truncate_prompt_tokens is not None:
            params = [dataclasses.replace(one, truncate_prompt_tokens=truncate_prompt_tokens) for one in params]
        self._pooling_spec()
        return self._run(batch, params, use_tqdm, self._adapters_list(lora_request, len(batch)))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParamsList = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each prompt: `outputs.embedding`, a list of floats."""
        _refuse(tokenization_kwargs=tokenization_kwargs)
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip
        return [_made(one, EmbeddingRequestOutput, EmbeddingOutput) for one in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParamsList = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The classes' probabilities of each prompt: `outputs.probs`."""
        _refuse(tokenization_kwargs=tokenization_kwargs)
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip
        return [_made(one, ClassificationRequestOutput, ClassificationOutput) for one in outputs]

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParamsList = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """The rewards of each prompt: `outputs.data`, [tokens, labels]; of a process reward model, one row a step."""
        _refuse(tokenization_kwargs=tokenization_kwargs)
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request, pooling_task="token_classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
        )  # fmt: skip

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | tuple[PoolingParams, PoolingParams] | None = None,
        lora_request: Adapters = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each of data_2 belongs to that of data_1 at its place, or to the one text there: `outputs.score`.

        A cross-encoder reads both together. Of an embedder it is the cosine of their vectors; of one whose checkpoint
        keeps the vectors of all tokens (arXiv:2004.12832), the sum of each of the first's tokens' largest product with
        one of the second's. pooling_params: for both, or of an embedder one for data_1 and one for data_2: queries
        and documents may have different prompts before them (`PoolingParams.prompt_name`).
        """
        _refuse(tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        pairs = text_pairs(data_1, data_2)
        spec = self._pooling_spec()
        params, of_documents = _of_sides(pooling_params)
        settings: dict[str, Any] = {"use_tqdm": use_tqdm, "truncate_prompt_tokens": truncate_prompt_tokens}
        if spec.is_cross_encoder:
            if params != of_documents:
                raise RequestError("pooling_params: this model reads both texts together, and takes one for them")
            prompts = [{"prompt_pair": pair} for pair in pairs]
            settings["lora_request"] = lora_request
            outputs = self.encode(prompts, params, pooling_task="score", **settings)
            return [_made(one, ScoringRequestOutput, lambda row: ScoringOutput(row[0])) for one in outputs]
        if spec.convert != "embed":
            raise RequestError(
                f"score: this model tells {len(spec.labels)} classes apart; pairs are scored by a model with one label "
                "or by an embedder"
            )
        firsts, seconds = ([*side] for side in zip(*pairs, strict=True))
        if isinstance(lora_request, Sequence):
            lora_request = [*lora_request, *lora_request]
        elif len(set(firsts)) == 1:  # computed once, for all pairs
            firsts = firsts[:1]
        task: PoolingTask = "token_embed" if spec.has_many_rows else "embed"
        of_each = [params] * len(firsts) + [of_documents] * len(seconds)
        outputs = self.encode([*firsts, *seconds], of_each, pooling_task=task, lora_request=lora_request, **settings)
        compare = comparison(spec)
        of_firsts = outputs[: len(firsts)] * (len(pairs) // len(firsts))
        return [compared(*both, compare) for both in zip(of_firsts, outputs[len(firsts) :], strict=True)]

    def _pooling_spec(self) -> PoolingSpec:
        if self.llm_engine.pooling is None:
            raise RequestError(GENERATES)
        return self.llm_engine.pooling


def _of_sides(given: Any) -> tuple[PoolingParams, PoolingParams]:
    """Of data_1 and of data_2. Raises RequestError."""
    sides = (given, given) if given is None or isinstance(given, PoolingParams) else given
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise RequestError(f"pooling_params must be PoolingParams, or two of them, not {given!r}")
    one, other = (PoolingParams() if side is None else side for side in sides)
    if not isinstance(one, PoolingParams) or not isinstance(other, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, or two of them, not {given!r}")
    return one, other


def _refuse(**given: Any) -> None:
    """Raise RequestError for arguments of vLLM's that are none here, with what there is instead."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name}: {_INSTEAD[name]}")


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of two lists of one length, or of one text and a list. Raises RequestError."""
    sides = [[side] if isinstance(side, str) else list(side) for side in (first, second)]
    for name, side in zip(("data_1", "data_2"), sides, strict=True):
        if not side or not all(isinstance(text, str) for text in side):
            raise RequestError(f"{name}: must be a text, or a list of one text at least")
    one, other = sides
    if len(one) not in (1, len(other)):
        raise RequestError(f"data_1 has {len(one)} texts and data_2 has {len(other)}: as many, or one in data_1")
    return list(zip(one if len(one) > 1 else repeat(one[0]), other, strict=False))


def compared(
    first: PoolingRequestOutput, second: PoolingRequestOutput, compare: Callable[[Any, Any], float]
) -> ScoringRequestOutput:
    """The score of two prompts of which an embedder has made vectors."""
    failure = first.failure or second.failure
    return ScoringRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        outputs=None if failure else ScoringOutput(compare(first.outputs.data, second.outputs.data)),
        prompt_token_ids=[*first.prompt_token_ids, *second.prompt_token_ids],
        num_cached_tokens=(first.num_cached_tokens or 0) + (second.num_cached_tokens or 0),
        lora_request=first.lora_request,
        failure=failure,
    )


def _made(output: PooledRequestOutput, kind: type[Any], make: Callable[[list[float]], Any]) -> Any:
    fields: Mapping[str, Any] = {one.name: getattr(output, one.name) for one in dataclasses.fields(PooledRequestOutput)}
    made = None if output.failure is not None else make(output.outputs.data.tolist())
    return kind(**{**fields, "outputs": made})
