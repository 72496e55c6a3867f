"""Gemma 3 (arXiv:2503.19786) that sees: a fixed number of features an image, whose tokens see one another.

Configuration fields that shape the arithmetic: vision_config (SigLIP), text_config (Gemma 3), mm_tokens_per_image,
boi_token_index, eoi_token_index, image_token_index. Crops (pan and scan) are not made, as the processor makes none
unless it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from quire import kernels
from quire.errors import CheckpointError
from quire.layers import RMSNorm
from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, VisionLanguageModel, text_model
from quire.models.vision.siglip import PUBLISHED_PARTS, RENAMES, SiglipTower, check_siglip
from quire.types import ImageLayout, MediaKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gemma3ForConditionalGeneration(VisionLanguageModel):
    own_renames: ClassVar = RENAMES
    published_parts: ClassVar = PUBLISHED_PARTS
    processor_settings: Mapping[str, Any] = {"do_pan_and_scan": False}
    around_marker = ("\n\n", "\n\n")

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        tower = SiglipTower(config)
        self.grid_tower = tower
        self.vision_tower = tower.tower
        self.multi_modal_projector = PoolingProjector(config)
        self.tokens: int = config.mm_tokens_per_image
        self.begin, self.end = config.boi_token_index, config.eoi_token_index
        self.adopt(text_model(config))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        check_siglip(config)
        side, vision = math.isqrt(config.mm_tokens_per_image or 0), config.vision_config
        grid = vision.image_size // vision.patch_size
        if side < 1 or side**2 != config.mm_tokens_per_image or grid // side < 1 or grid // (grid // side) != side:
            refuse(config, "mm_tokens_per_image", f"it must be a square of which {grid} patches a side make pools")
        for field in ("boi_token_index", "eoi_token_index"):
            token = getattr(config, field)
            if type(token) is not int or not 0 <= token < config.text_config.vocab_size:
                refuse(config, field, "it must be a token of the vocabulary")

    @property
    def media_marker_ids(self) -> dict[MediaKind, int]:
        """What a prompt has for an image is the token that begins it."""
        return {"image": self.begin}

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        length = settings.get("image_seq_length", self.tokens)
        if length != self.tokens:
            raise CheckpointError(
                f"processor_config.json's image_seq_length={length} is not config.json's "
                f"mm_tokens_per_image={self.tokens}."
            )

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        self.grid_tower.check_sides(tuple(inputs["pixel_values"].shape[-3:]))
        return self.given_layout(self.tokens)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        self.grid_tower.check_sides((3, *final))
        return self.given_layout(self.tokens)

    def given_layout(self, features: int) -> ImageLayout:
        if features != self.tokens:
            raise ValueError(f"an image of this model has {self.tokens} features, not {features}")
        assert self.image_token_id is not None
        ids = (self.begin, *[self.image_token_id] * features, self.end)
        return ImageLayout(features + 2, ids=ids, mask=(False, *[True] * features, False), sees=((1, 1 + features),))

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        weight = self.multi_modal_projector.mm_input_projection_weight
        return self.multi_modal_projector(self.grid_tower(inputs["pixel_values"].to(weight.dtype)))


class PoolingProjector(nn.Module):
    """The mean of each square of patches, a norm, and a matrix stored [in, out]."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        channels, vision = config.vision_config.hidden_size, config.vision_config
        weight = torch.empty(channels, config.text_config.hidden_size)
        self.mm_input_projection_weight = nn.Parameter(weight, requires_grad=False)
        self.mm_soft_emb_norm = RMSNorm(channels, vision.layer_norm_eps, weight_offset=1.0)
        self.grid: int = vision.image_size // vision.patch_size
        self.pool = self.grid // math.isqrt(config.mm_tokens_per_image)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[1, patches, channels] -> [tokens, C]."""
        picture = patches.transpose(1, 2).reshape(1, -1, self.grid, self.grid)
        pooled = functional.avg_pool2d(picture, self.pool)[0].flatten(1).T.contiguous()
        columns = self.mm_input_projection_weight.T.contiguous()
        return kernels.linear(self.mm_soft_emb_norm(pooled), [columns], [None])
