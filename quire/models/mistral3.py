"""Mistral 3 (Mistral Small 3.1, 2025): LLaVA with Pixtral's tower, whose patches are merged by groups of a square.

Configuration fields beyond LLaVA's: spatial_merge_size, the side of such a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from quire.layers import Linear, RMSNorm
from quire.models.base import refuse
from quire.models.llava import LlavaForConditionalGeneration
from quire.models.vision.base import ImageInputs
from quire.models.vision.pixtral import PixtralTower, RowsOfPatches
from quire.models.vision.towers import Projector

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Mistral3ForConditionalGeneration(LlavaForConditionalGeneration):
    grid_tower: RowsOfPatches

    @classmethod
    def towers(cls, config: PretrainedConfig) -> tuple[PixtralTower, RowsOfPatches]:
        tower = PixtralTower(config.vision_config)
        return tower, RowsOfPatches(config, tower, config.spatial_merge_size)

    def projector(self, config: PretrainedConfig) -> nn.Module:
        return MergingProjector(config)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        if config.vision_config.model_type != "pixtral":
            refuse(config, "vision_config", "its tower must be 'pixtral'", config.vision_config.model_type)
        super().check_config(config)
        merge, layers = config.spatial_merge_size, config.vision_feature_layer
        if type(merge) is not int or merge < 1:
            refuse(config, "spatial_merge_size", "it must be a whole number above 0")
        if not isinstance(layers, int) and len(layers) != 1:
            refuse(config, "vision_feature_layer", "its projector takes one hidden state")

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        pixels, patch = inputs["pixel_values"], self.grid_tower.tower.patch
        features = self.grid_tower(pixels.to(self.grid_tower.tower.patch_conv.weight.dtype))[0]
        return self.multi_modal_projector(features, pixels.shape[-2] // patch, pixels.shape[-1] // patch)


class MergingProjector(Projector):
    """A norm, a layer that makes one of each group of patches, and LLaVA's two."""

    def __init__(self, config: PretrainedConfig) -> None:
        channels = config.vision_config.hidden_size
        super().__init__(config, channels)
        self.merge: int = config.spatial_merge_size
        self.norm = RMSNorm(channels, config.text_config.rms_norm_eps)
        self.patch_merger = nn.ModuleDict({"merging_layer": Linear(channels * self.merge**2, channels, bias=False)})

    def forward(self, features: torch.Tensor, rows: int, columns: int) -> torch.Tensor:  # type: ignore[override]
        """features: [rows * columns, channels], patches -> [groups, C]. What fills no group is left out."""
        picture = self.norm(features).T.reshape(1, -1, rows, columns)
        groups = functional.unfold(picture, self.merge, stride=self.merge)[0].T.contiguous()
        return super().forward(self.patch_merger["merging_layer"](groups))
