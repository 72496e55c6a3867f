"""PaliGemma and PaliGemma 2 (arXiv:2407.07726, arXiv:2412.03555): SigLIP's patches, projected, before a prompt of which
all tokens see one another; the answer is causal.

The processor lays the whole text out: an image's features where its marker is (in front of a text that has none), BOS
behind the last image, and the end of a line behind the text. Without an image there is no answer: the processor takes
no such prompt, and what transformers' model sees of later tokens depends on how its attention is computed then.
Configuration fields that shape the arithmetic: vision_config (SigLIP), text_config (Gemma or Gemma 2), projection_dim,
image_token_index.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.errors import CheckpointError, RequestError
from quire.layers import Linear
from quire.models.base import CausalLM, refuse
from quire.models.vision.base import ImageInputs, VisionLanguageModel, text_model
from quire.models.vision.siglip import PUBLISHED_PARTS, RENAMES, SiglipTower, check_siglip
from quire.types import ImageLayout, MarkerWords

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TEXTS = ("gemma", "gemma2")
_MARKER, _NEWLINE = "<image>", "\n"
# Tokens for places and outlines, which the processor adds to a tokenizer that has none.
_PLACES = re.compile(r"<loc(?:0\d{3}|10[01]\d|102[0-3])>|<seg(?:0\d\d|1[01]\d|12[0-7])>")


class PaliGemmaForConditionalGeneration(VisionLanguageModel):
    own_renames: ClassVar = RENAMES
    published_parts: ClassVar = PUBLISHED_PARTS
    prompt_sees = True
    lays_out_special = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        tower = SiglipTower(config)
        self.grid_tower = tower
        self.vision_tower = tower.tower
        vision = config.vision_config
        self.multi_modal_projector = nn.ModuleDict({"linear": Linear(vision.hidden_size, vision.projection_dim)})
        self.adopt(_text_model(config))
        self._encode: Callable[[str], list[int]] | None = None

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_siglip(config)
        text, projected = config.text_config, config.vision_config.projection_dim
        if text.model_type not in _TEXTS:
            refuse(config, "text_config", f"its model_type must be one of {', '.join(_TEXTS)}", text.model_type)
        if projected != text.hidden_size:
            reason = f"it must be the text model's hidden_size, which is {text.hidden_size}"
            refuse(config, "projection_dim", reason, projected)

    def adopt(self, text: CausalLM) -> None:
        super().adopt(text)
        if self.rope_threshold is not None:
            # Its positions count from 1: where frequencies are others from a length on, that is one token earlier.
            parameters = self.config.text_config.rope_parameters
            refuse(self.config, "text_config.rope_parameters", "frequencies must not depend on the length", parameters)

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        length, patches = settings.get("image_seq_length"), self.grid_tower.patches
        if length not in (None, patches):
            raise CheckpointError(
                f"the image processor's image_seq_length is {length}, and config.json's vision_config makes {patches} "
                "features of an image."
            )

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def lay_out(self, pieces: Sequence[str], images: int, words: MarkerWords) -> list[str]:
        laid = list(pieces)
        if not images:
            return laid
        self._check_words(pieces, words)
        last = max((number for number, piece in enumerate(laid) if words.image in piece), default=None)
        if last is None:
            laid[0] = words.image * images + words.bos + laid[0]
        else:
            before, _, behind = laid[last].rpartition(words.image)
            laid[last] = before + words.image + words.bos + behind
        laid[-1] += _NEWLINE
        return laid

    def _check_words(self, pieces: Sequence[str], words: MarkerWords) -> None:
        """That the tokenizer is one of this family's. Raises RequestError."""
        if words.image != _MARKER or not words.bos:
            raise RequestError(
                f"the tokenizer's image token is {words.image!r} and its BOS {words.bos or None!r}; this model's texts "
                f"need {_MARKER!r} and a BOS: load its own tokenizer, or give token ids"
            )
        assert self._encode is not None, "read_processor comes first"
        for word in sorted({word for piece in pieces for word in _PLACES.findall(piece)}):
            if len(self._encode(word)) != 1:
                raise RequestError(f"the tokenizer has no token {word!r}: load the model's own, or give token ids")

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        self.grid_tower.check_sides(tuple(inputs["pixel_values"].shape[-3:]))
        return ImageLayout(self.grid_tower.patches)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        self.grid_tower.check_sides((3, *final))
        return ImageLayout(self.grid_tower.patches)

    def given_layout(self, features: int) -> ImageLayout:
        if features != self.grid_tower.patches:
            raise ValueError(f"an image of this model has {self.grid_tower.patches} features, not {features}")
        return ImageLayout(features)

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        project = self.multi_modal_projector["linear"]
        patches = self.grid_tower(inputs["pixel_values"].to(self.dtype))
        return project(patches[0].contiguous())


def _text_model(config: PretrainedConfig) -> CausalLM:
    """The text model without use_bidirectional_attention, as what tokens see of later ones is said of a prompt here."""
    whole = copy.copy(config)
    whole.text_config = copy.copy(config.text_config)
    whole.text_config.use_bidirectional_attention = None
    return text_model(whole)
