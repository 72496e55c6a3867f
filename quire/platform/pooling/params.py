"""What a request for vectors, classes or scores can ask for: vLLM's names and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.pooling_types import TASKS, Activation, PoolingInput, PoolingKind, PoolingSpec, PoolingTask


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How a prompt's hidden states become numbers.

    task: "embed", one vector; "token_embed", one for each token; "classify", one row of classes; "token_classify", one
    for each token; "score", one number. None: the model's own.
    dimensions: cut a vector to so many numbers, of models that were trained for that (arXiv:2205.13147).
    normalize: of vectors: give them length 1; None: as the model has it. use_activation: the same, and of classes the
    softmax or sigmoid; False: the bare numbers.
    truncate_prompt_tokens: keep so many of the prompt's tokens at most, the first ones, with the special tokens that
    end it; -1: as many as the model takes. None: a prompt that is too long is refused.

    prompt_name: which of the checkpoint's prompts (config_sentence_transformers.json) is put before a text; None: the
    one that the checkpoint puts there unasked, if any; "": none.

    Raises RequestError for values that make no sense.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task={self.task!r}: must be one of {', '.join(TASKS)}")
        _check_count("dimensions", self.dimensions, 1)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) not in (None, True, False):
                raise RequestError(f"{name}={getattr(self, name)!r}: must be true, false or null")
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise RequestError(f"prompt_name={self.prompt_name!r}: must be a name, or null")
        if self.truncate_prompt_tokens != -1:
            _check_count("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)

    def resolve(self, spec: PoolingSpec, second: int = 0) -> PoolingInput:
        """What it means for a model. second: as of `PoolingInput`. Raises RequestError for what the model has not."""
        task = self.task or spec.tasks[0]
        if task not in spec.tasks:
            raise RequestError(
                f"task={task!r}: this model was loaded with convert={spec.convert!r} and can {', '.join(spec.tasks)}"
            )
        embeds = task in ("embed", "token_embed")
        kind: PoolingKind = spec.token_kind if task.startswith("token_") else spec.kind
        if self.dimensions is not None and not embeds:
            raise RequestError(f"dimensions={self.dimensions}: classes have no dimensions that could be cut")
        if self.normalize is not None and not embeds:
            raise RequestError("normalize: classes are no vectors; use_activation says whether they get theirs")
        activation: Activation = spec.activation
        wanted = self.normalize if self.normalize is not None else self.use_activation
        if wanted is not None:
            activation = "none" if not wanted else "normalize" if embeds else spec.activation
        return PoolingInput(kind, activation, self._cut(spec), second)

    def _cut(self, spec: PoolingSpec) -> int:
        wanted = self.dimensions
        if wanted is None or wanted == spec.width:
            return 0
        if spec.dimensions is None:
            raise RequestError(
                f"dimensions={wanted}: this model's vectors have {spec.width} numbers, and it was not trained for "
                "fewer (config.json has no matryoshka_dimensions)"
            )
        if wanted > spec.width or (spec.dimensions and wanted not in spec.dimensions):
            known = ", ".join(map(str, spec.dimensions)) or f"any number up to {spec.width}"
            raise RequestError(f"dimensions={wanted}: this model has {known}")
        return wanted


def _check_count(name: str, value: Any, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise RequestError(f"{name}={value!r}: must be a whole number from {least}, or null")
