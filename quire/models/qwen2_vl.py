"""Qwen2-VL (arXiv:2409.12191): images of any resolution, four patches a token, and rotation in three dimensions.

Configuration fields that shape the arithmetic: vision_config (depth, embed_dim, num_heads, mlp_ratio, hidden_act,
patch_size, spatial_merge_size, temporal_patch_size), text_config (a Qwen2 with `mrope_section` among its rotary
parameters), image_token_id. Videos are not served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from quire.errors import CheckpointError
from quire.models.base import refuse
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.vision.base import ImageInputs, VisionLanguageModel
from quire.models.vision.towers import build_tower
from quire.types import ImageLayout, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    mrope = True
    # Hugging Face's names before release 4.52 and since then.
    own_renames: ClassVar = (
        (r"(?:model\.)?visual\.(.+)", r"visual.\1"),
        (r"model\.((?:embed_tokens|layers|norm)\..+)", r"language_model.model.\1"),
    )

    published_parts: ClassVar = {
        "visual": ("visual", "model.visual"),
        "language_model.{base}": ("{base}", "model.language_model"),
        "language_model.lm_head": ("lm_head", "lm_head"),
    }

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        vision = config.vision_config
        self.visual = build_tower(lambda: self.make_tower(vision))
        self.merge: int = vision.spatial_merge_size
        self.patch: int = vision.patch_size
        self.columns: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2  # of a patch
        text = Qwen2ForCausalLM(config.text_config)
        if not text.model.rotaries[0].mrope:
            refuse(config, "text_config", "its rotary parameters have no mrope_section")
        self.adopt(text)

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        """Transformers' tower for this configuration; a model that has another one makes it here."""
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        return Qwen2VisionTransformerPretrainedModel._from_config(vision)

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        time, height, width = inputs["image_grid_thw"][0].tolist()
        merge = self.merge
        if time != 1 or height < merge or width < merge or height % merge or width % merge:
            raise ValueError(
                f"its grid of patches is {[time, height, width]}; an image's is [1, a multiple of {merge}, another]"
            )
        if "pixel_values" in inputs and tuple(inputs["pixel_values"].shape) != (height * width, self.columns):
            raise ValueError(
                f"the image processor makes {list(inputs['pixel_values'].shape)} of it, and the tower takes "
                f"{[height * width, self.columns]}: their patch sizes differ"
            )
        return ImageLayout(height * width // merge**2, (time, height // merge, width // merge))

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        grid = torch.tensor([[1, *(side // self.patch for side in final)]])
        return self.image_layout({"image_grid_thw": grid})

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        merge = settings.get("merge_size", self.merge)
        if merge != self.merge:
            raise CheckpointError(
                f"the image processor's merge_size={merge} is not config.json's spatial_merge_size={self.merge}."
            )

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        pixels = inputs["pixel_values"].to(next(self.visual.parameters()).dtype)
        result = self.visual(pixels, grid_thw=inputs["image_grid_thw"])
        # Before transformers 5 the merged features were the result itself.
        return result if isinstance(result, torch.Tensor) else result.pooler_output

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """Text counts on in all three dimensions; an image's tokens count in each by their place in its grid, and the
        text behind it goes on from the largest."""
        positions = np.empty((3, length), dtype=np.int64)
        at = following = 0
        for item in media:
            positions[:, at : item.offset] = np.arange(following, following + item.offset - at)
            following += item.offset - at
            assert item.grid is not None
            places = np.indices(item.grid).reshape(3, -1)
            positions[:, item.offset : item.end] = following + places
            following += max(item.grid[1:])
            at = item.end
        positions[:, at:] = np.arange(following, following + length - at)
        return positions
