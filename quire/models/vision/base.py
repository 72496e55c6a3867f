"""A text model that takes images: what the engine asks of a vision-language model beyond a `CausalLM`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from quire import registry
from quire.errors import UnsupportedModelError
from quire.layers import ROTARY_FIELDS
from quire.models.base import CausalLM, refuse
from quire.models.fields import check_fields
from quire.types import ForwardContext, ImageLayout, KVCache, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ImageInputs = Mapping[str, torch.Tensor]  # one image's, as the image processor returns them


class VisionLanguageModel(CausalLM):
    """A CausalLM that puts features of images in the place of placeholder tokens.

    A subclass builds `language_model` (by `text_model`) and its own parameters, and defines `image_layout` and
    `encode`.

    language_model: the text model, whose parameters' names begin with that.
    image_token_id: the placeholder.
    mrope: whether tokens turn by three positions, which `rotary_positions` then tells.
    """

    language_model: CausalLM
    image_token_id: int
    mrope = False

    # (pattern, new name) for the parts that are not the text model's:
    own_renames: ClassVar[Sequence[tuple[str, str]]] = ()
    # For `published_names`: a part of the model -> its name in each of Hugging Face's namings, as many for every part;
    # {base} is the text model's own name for its base model.
    published_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if type(config.image_token_id) is not int or not 0 <= config.image_token_id < 2**31:
            refuse(config, "image_token_id", "it must be a token id, from 0 to 2147483647")
        self.image_token_id = config.image_token_id

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        """Checks what is not the text model's, which checks its own part.

        Files of transformers 4.52 to 4.56 have the text model's fields twice, outside too, where nobody reads them.
        """
        text = getattr(config, "text_config", None)
        check_fields(config, {*cls.supported_fields, *(() if text is None else {*vars(text), *ROTARY_FIELDS})})

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        """What an image takes in a prompt. Raises ValueError when it does not fit the model."""
        raise NotImplementedError

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        """What an image of `size` (height, width) will take, of which the image processor will make `final`.

        None: that is known only when it is made. Raises ValueError when it will not fit the model.
        """
        return None

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        """The features of one image: [tokens, E], to stand in the place of embeddings."""
        raise NotImplementedError

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        """Raise CheckpointError where the image processor's settings contradict the model's configuration."""

    def adopt(self, text: CausalLM) -> None:
        """Take the text model, its limits and its loading tables."""
        self.language_model = text
        self.kv_spec, self.max_model_len, self.rope_threshold = text.kv_spec, text.max_model_len, text.rope_threshold
        prefix = re.escape("language_model.")
        self.checkpoint_renames = (
            *self.own_renames,
            (r"(?:model\.language_model|language_model\.model)\.(.+)", rf"language_model.{_base_name(text)}.\1"),
            (r"lm_head\.(.+)", r"language_model.lm_head.\1"),
            *((prefix + pattern, "language_model." + name) for pattern, name in text.checkpoint_renames),
        )
        self.checkpoint_ignored = tuple(prefix + p for p in text.checkpoint_ignored)
        self.checkpoint_transposed = tuple(prefix + p for p in text.checkpoint_transposed)
        self.tied_weights = {
            f"language_model.{name}": f"language_model.{shared}" for name, shared in text.tied_weights.items()
        }

    def published_names(self, name: str) -> tuple[str, ...]:
        base = _base_name(self.language_model)
        for part, published in self.published_parts.items():
            own = part.format(base=base)
            if name == own or name.startswith(own + "."):
                return tuple(other.format(base=base) + name[len(own) :] for other in published)
        return (name,) * max((len(names) for names in self.published_parts.values()), default=1)

    def is_visual(self, name: str) -> bool:
        return not name.startswith("language_model.")

    @property
    def is_tied(self) -> bool:
        return super().is_tied or self.language_model.is_tied

    @property
    def vocab_size(self) -> int:
        return self.language_model.vocab_size

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed(input_ids)

    def forward(self, embeddings: torch.Tensor, ctx: ForwardContext, kv: Sequence[KVCache]) -> torch.Tensor:
        return self.language_model(embeddings, ctx, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.language_model.logits(hidden)

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """What a prompt's tokens turn by: [3, length] int64, for models with `mrope`."""
        raise NotImplementedError


def text_model(config: PretrainedConfig) -> CausalLM:
    """The registry's model for `config.text_config`. Raises UnsupportedModelError."""
    text: Any = config.text_config
    names = list(getattr(text, "architectures", None) or ())
    if not names:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
        names = [name] if name else []
    if not names:
        raise UnsupportedModelError(
            f"config.json: text_config is of model_type {text.model_type!r}, for which no text model is known."
        )
    try:
        model_class = registry.resolve(names)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"config.json: text_config: {error}") from error
    if not issubclass(model_class, CausalLM) or issubclass(model_class, VisionLanguageModel):
        raise UnsupportedModelError(f"config.json: text_config: {names[0]} is no text model.")
    return model_class(text)


def _base_name(text: CausalLM) -> str:
    """What the text model's parameters are called by, beside lm_head: Hugging Face leaves it out inside a LLaVA."""
    names = {name.partition(".")[0] for name, _ in text.named_parameters()} - {"lm_head"}
    if len(names) != 1:
        raise UnsupportedModelError(f"{type(text).__name__} has no one base model, but {sorted(names)}.")
    return names.pop()
