"""LLaVA-NeXT-Video (https://llava-vl.github.io/blog/2024-04-30-llava-next-video/): LLaVA-NeXT, tuned for frames.

Images are LLaVA-NeXT's. Of a video, each frame is projected with squares of its patches made one. Configuration fields
beyond LLaVA-NeXT's: spatial_pool_mode and spatial_pool_stride, how they are; video_token_index.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.models.base import refuse
from quire.models.llava import LlavaForConditionalGeneration
from quire.models.llava_next import LlavaNextForConditionalGeneration
from quire.models.vision.base import MediaInputs
from quire.types import MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlavaNextVideoForConditionalGeneration(LlavaNextForConditionalGeneration):
    token_id_fields: ClassVar = {"image": "image_token_id", "video": "video_token_id"}
    own_renames: ClassVar = (
        *LlavaForConditionalGeneration.own_renames,
        (r"(?:model\.)?(vision_resampler\..+)", r"\1"),
    )

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.vision_resampler = Pooler(config)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        grid = config.vision_config.image_size // config.vision_config.patch_size
        mode, stride = config.spatial_pool_mode, config.spatial_pool_stride
        if mode not in ("average", "max", "conv"):
            refuse(config, "spatial_pool_mode", "it must be 'average', 'max' or 'conv'")
        if type(stride) is not int or not 1 <= stride <= grid:
            refuse(config, "spatial_pool_stride", f"it must be a number of a frame's {grid} patches a side")

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        return MediaLayout(self.frames_of(inputs) * (self.grid_tower.grid // self.vision_resampler.stride) ** 2)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        self.frames_of(inputs)
        pixels = inputs["pixel_values_videos"][0].to(self.dtype)
        return self.multi_modal_projector(self.vision_resampler(self.grid_tower(pixels))).flatten(0, 1)


class Pooler(nn.Module):
    """What makes one feature of each square of a frame's."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        stride, channels = config.spatial_pool_stride, config.vision_config.hidden_size
        self.stride: int = stride
        self.pool: nn.Module
        if config.spatial_pool_mode == "conv":
            out = getattr(config, "spatial_pool_out_channels", channels)
            self.pool = nn.Conv2d(channels, out, kernel_size=stride, stride=stride)
        else:
            self.pool = {"average": nn.AvgPool2d, "max": nn.MaxPool2d}[config.spatial_pool_mode](stride, stride)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[N, grid * grid, C] -> [N, (grid // stride) ** 2, C]."""
        grid = math.isqrt(features.shape[1])
        channels_first = features.transpose(1, 2).unflatten(2, (grid, grid)).contiguous()
        return self.pool(channels_first).flatten(2).transpose(1, 2)
