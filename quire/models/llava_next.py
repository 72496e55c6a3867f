"""LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/): an image whole, and once more in tiles.

The tiles are cut from the image scaled into the best of several resolutions; what was padding is left out of their
features again, and each row of them ends in a learned `image_newline`. Configuration fields beyond LLaVA's:
image_grid_pinpoints, the resolutions [height, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.models.base import refuse
from quire.models.llava import LlavaForConditionalGeneration
from quire.models.vision.base import ImageInputs
from quire.models.vision.towers import FixedGridTower
from quire.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    takes_rows: ClassVar = False
    takes_frames: ClassVar = False
    grid_tower: FixedGridTower

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size), requires_grad=False)
        self.resolutions = [tuple(one) for one in config.image_grid_pinpoints]
        if self.grid_tower.tokens != self.grid_tower.grid**2:
            refuse(
                config,
                "vision_feature_select_strategy",
                "it must leave one feature for each patch, or tiles cannot be put together",
            )

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        side, points = config.vision_config.image_size, config.image_grid_pinpoints
        if not isinstance(points, (list, tuple)) or not points:
            refuse(config, "image_grid_pinpoints", "it must be a list of [height, width]")
        for one in points:
            if len(one) != 2 or any(type(size) is not int or size < side or size % side for size in one):
                refuse(config, "image_grid_pinpoints", f"each must be two multiples of image_size={side}")

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        points = settings.get("image_grid_pinpoints", self.resolutions)
        if [tuple(one) for one in points] != self.resolutions:
            raise CheckpointError(
                f"the image processor's image_grid_pinpoints={points} are not config.json's {self.resolutions}: tiles "
                "would be put together wrongly."
            )

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        self.grid_tower.layout_of(inputs)
        rows, columns = self._tiles(inputs)
        if inputs["pixel_values"].shape[1] != 1 + rows * columns:
            raise ValueError(
                f"the image processor makes {inputs['pixel_values'].shape[1]} tiles of it, and "
                f"image_grid_pinpoints asks for {1 + rows * columns}"
            )
        return self._layout(inputs)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        self.grid_tower.layout(*final)
        return self._layout({"image_sizes": torch.tensor([size])})

    def _layout(self, inputs: ImageInputs) -> ImageLayout:
        (top, bottom), (left, right) = self._kept(inputs)
        rows, columns = self.shrunk(bottom - top, right - left)
        return ImageLayout(self.grid_tower.tokens + rows * (columns + 1))  # each row has its newline

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        features = self._project(inputs["pixel_values"][0])  # [1 + tiles, grid * grid, C]
        whole, tiles = features[0], features[1:]
        rows, columns = self._tiles(inputs)
        grid, channels = self.grid_tower.grid, features.shape[-1]
        picture = tiles.view(rows, columns, grid, grid, channels).transpose(1, 2)
        picture = picture.reshape(rows * grid, columns * grid, channels)
        (top, bottom), (left, right) = self._kept(inputs)
        picture = self.scaled(picture[top:bottom, left:right])
        lines = torch.cat((picture, self.image_newline.expand(len(picture), 1, channels)), dim=1)
        return torch.cat((whole, lines.flatten(0, 1)))

    def shrunk(self, rows: int, columns: int) -> tuple[int, int]:
        """To how many rows and columns the tiles' features are scaled."""
        return rows, columns

    def scaled(self, picture: torch.Tensor) -> torch.Tensor:
        """[rows, columns, C] -> the same, as many as `shrunk` says."""
        return picture

    def _tiles(self, inputs: ImageInputs) -> tuple[int, int]:
        """Rows and columns of the image's tiles."""
        from transformers.image_processing_utils import select_best_resolution

        height, width = select_best_resolution(tuple(inputs["image_sizes"][0].tolist()), self.resolutions)
        return height // self.grid_tower.side, width // self.grid_tower.side

    def _kept(self, inputs: ImageInputs) -> tuple[tuple[int, int], tuple[int, int]]:
        """(first row, end), (first column, end) of the features that are no padding."""
        height, width = inputs["image_sizes"][0].tolist()
        rows, columns = (count * self.grid_tower.grid for count in self._tiles(inputs))
        # Rounded to the seventh decimal before it is cut, as in transformers: 23.99999999 are 24.
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            return (padding, rows - padding), (0, columns)
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        return (0, rows), (padding, columns - padding)
