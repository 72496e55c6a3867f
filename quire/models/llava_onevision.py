"""LLaVA-OneVision (arXiv:2408.03326): LLaVA-NeXT's tiles of a SigLIP tower, scaled down where they are many; videos.

The tiles' features together are scaled to about as many as `vision_aspect_ratio` = "anyres_max_N" says, N tiles'. Each
image of a prompt is cut into tiles, also where there are several: what an image is made into does not depend on others.
Of a video's frames, each side of the grid of features is halved, and behind the last frame stands one `image_newline`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from quire.models.base import refuse
from quire.models.llava_next import LlavaNextForConditionalGeneration
from quire.models.vision.base import MediaInputs
from quire.types import MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LARGER = 1.1  # than allowed by so much, in each direction: from there on features are scaled


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    token_id_fields: ClassVar = {"image": "image_token_id", "video": "video_token_id"}

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        match = re.fullmatch(r"anyres_max_(\d{1,9})", str(config.vision_aspect_ratio))
        most_tiles = int(match[1]) if match else 0
        if most_tiles < 1:
            refuse(config, "vision_aspect_ratio", "it must be 'anyres_max_' and a number above 0")
        self.most_features: int = most_tiles * self.grid_tower.grid**2

    def shrunk(self, rows: int, columns: int) -> tuple[int, int]:
        ratio = math.sqrt(rows * columns / self.most_features)
        return (int(rows // ratio), int(columns // ratio)) if ratio > _LARGER else (rows, columns)

    def scaled(self, picture: torch.Tensor) -> torch.Tensor:
        size = self.shrunk(*picture.shape[:2])
        if size == picture.shape[:2]:
            return picture
        channels_first = picture.permute(2, 0, 1)[None].contiguous()
        return nn.functional.interpolate(channels_first, size, mode="bilinear")[0].permute(1, 2, 0)

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        frames = self.frames_of(inputs)
        return MediaLayout(frames * math.ceil(self.grid_tower.grid / 2) ** 2 + 1)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        self.frames_of(inputs)
        features, grid = self._project(inputs["pixel_values_videos"][0]), self.grid_tower.grid
        channels_first = features.transpose(1, 2).unflatten(2, (grid, grid)).contiguous()
        half = math.ceil(grid / 2)
        halved = nn.functional.interpolate(channels_first, (half, half), mode="bilinear")
        rows = halved.flatten(2).transpose(1, 2).flatten(0, 1)
        return torch.cat((rows, self.image_newline[None]))
