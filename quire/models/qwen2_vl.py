"""Qwen2-VL (arXiv:2409.12191): images of any resolution, four patches a token, and rotation in three dimensions.

Configuration fields that shape the arithmetic: vision_config (depth, embed_dim, num_heads, mlp_ratio, hidden_act,
patch_size, spatial_merge_size, temporal_patch_size), text_config (a Qwen2 with `mrope_section` among its rotary
parameters), image_token_id, video_token_id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from quire.errors import CheckpointError
from quire.models.base import refuse
from quire.models.decoder import DecoderForCausalLM
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.vision.base import ImageInputs, MediaInputs, VisionLanguageModel
from quire.models.vision.segment_tower import use_segment_layers
from quire.models.vision.towers import build_tower
from quire.types import Grid, ImageLayout, MediaLayout, PlaceholderRange

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    mrope = True
    token_id_fields: ClassVar = {"image": "image_token_id", "video": "video_token_id"}
    tower_width: ClassVar = "hidden_size"  # the field of vision_config that says how wide features are
    text_class: ClassVar[type[DecoderForCausalLM]] = Qwen2ForCausalLM
    # Hugging Face's names before release 4.52 and since then.
    own_renames: ClassVar[Sequence[tuple[str, str]]] = (
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
        self.check_tower(config)
        self.visual = build_tower(lambda: self.make_tower(vision))
        use_segment_layers(self.visual, vision.hidden_act)
        self.merge: int = vision.spatial_merge_size
        self.patch: int = vision.patch_size
        self.span: int = vision.temporal_patch_size
        # Positions in time that are a second, in models that turn by seconds.
        self.tokens_per_second = float(getattr(vision, "tokens_per_second", 0) or 0)
        self.columns: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2  # of a patch
        text = self.text_class(config.text_config)
        if not text.model.rotaries[0].mrope:
            refuse(config, "text_config", "its rotary parameters have no mrope_section")
        self.adopt(text)

    @classmethod
    def check_tower(cls, config: PretrainedConfig) -> None:
        """Raise UnsupportedModelError for a tower whose features cannot be made, or have no place in the text model."""
        vision = config.vision_config
        for field in ("patch_size", "temporal_patch_size", "spatial_merge_size", "num_heads"):
            if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
                refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
        width = getattr(vision, "embed_dim", None) or vision.hidden_size
        if width % vision.num_heads or width // vision.num_heads % 4:
            reason = f"heads must share {width} channels, a multiple of 4 each: they turn in height and in width"
            refuse(config, "vision_config.num_heads", reason, vision.num_heads)
        field = cls.tower_width
        if getattr(vision, field) != config.text_config.hidden_size:
            reason = f"features must be as wide as the text model's hidden_size={config.text_config.hidden_size}"
            refuse(config, f"vision_config.{field}", reason, getattr(vision, field))

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

    def video_grid(self, inputs: MediaInputs) -> Grid:
        """A video's patches in time, height and width, after merging. Raises ValueError when it does not fit."""
        time, height, width = inputs["video_grid_thw"][0].tolist()
        merge, pixels = self.merge, inputs["pixel_values_videos"]
        if min(height, width) < merge or height % merge or width % merge:
            raise ValueError(f"its grid of patches is {[time, height, width]}; sides must be multiples of {merge}")
        if tuple(pixels.shape) != (time * height * width, self.columns):
            raise ValueError(
                f"the video processor makes {list(pixels.shape)} of it, and the tower takes "
                f"{[time * height * width, self.columns]}: their patch sizes differ"
            )
        return time, height // merge, width // merge

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        time, height, width = grid = self.video_grid(inputs)
        seconds = self.span / float(inputs["sampled_fps"][0]) if self.tokens_per_second else 0.0
        return MediaLayout(time * height * width, grid, seconds=seconds)

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
        pixels = inputs["pixel_values"].to(self.dtype)
        result = self.visual(pixels, grid_thw=inputs["image_grid_thw"])
        # Before transformers 5 the merged features were the result itself.
        return result if isinstance(result, torch.Tensor) else result.pooler_output

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        return self.encode({"pixel_values": inputs["pixel_values_videos"], "image_grid_thw": inputs["video_grid_thw"]})

    def rotary_positions(self, length: int, media: Sequence[PlaceholderRange]) -> np.ndarray:
        """Text counts on in all three dimensions; an image's or a video's tokens count in each by their place in its
        grid, in time by seconds where the model does so; the text behind goes on from the largest in space."""
        positions = np.empty((3, length), dtype=np.int64)
        at = following = 0
        for item in media:
            positions[:, at : item.offset] = np.arange(following, following + item.offset - at)
            following += item.offset - at
            assert item.grid is not None
            places = np.indices(item.grid).reshape(3, -1)
            if item.kind == "video" and self.tokens_per_second:
                step = np.float32(self.tokens_per_second) * np.float32(item.seconds)
                places[0] = (places[0].astype(np.float32) * step).astype(np.int64)
            positions[:, item.offset : item.end] = following + places
            following += max(item.grid[1:])
            at = item.end
        positions[:, at:] = np.arange(following, following + length - at)
        return positions
