"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL with a tower whose layers mostly see windows of an image.

Configuration fields that shape the arithmetic: vision_config (depth, hidden_size, intermediate_size, num_heads,
hidden_act, patch_size, spatial_merge_size, temporal_patch_size, window_size in pixels, fullatt_block_indexes: the
layers that see the whole image, out_hidden_size), text_config (a Qwen2 with `mrope_section` among its rotary
parameters), image_token_id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from quire.models.base import refuse
from quire.models.qwen2_vl import Qwen2VLForConditionalGeneration

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    tower_width: ClassVar = "out_hidden_size"

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        return Qwen2_5_VisionTransformerPretrainedModel._from_config(vision)

    @classmethod
    def check_tower(cls, config: PretrainedConfig) -> None:
        super().check_tower(config)
        vision = config.vision_config
        if vision.window_size < vision.patch_size * vision.spatial_merge_size:
            refuse(config, "vision_config.window_size", "a window must hold a token at least", vision.window_size)
        layers = vision.fullatt_block_indexes
        if not all(type(layer) is int for layer in layers):
            refuse(config, "vision_config.fullatt_block_indexes", "it must be a list of layers' numbers", layers)
