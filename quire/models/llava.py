"""LLaVA (arXiv:2304.08485, 2310.03744): a fixed grid of a tower's patches, projected, is one image.

With Pixtral's tower (arXiv:2410.07073) an image has rows of patches, as many as it is high, each of which ends in a
token. Configuration fields that shape the arithmetic: vision_config (CLIP, SigLIP or Pixtral), text_config (any text
model of the registry), vision_feature_layer, vision_feature_select_strategy, projector_hidden_act,
multimodal_projector_bias, image_token_index.

A model that was trained on videos says so by `video_token_index`, a field of quire's own: a video is its frames, each
as an image would be, one after the other. transformers, which knows LLaVA's images alone, gives the same answers when
it is given the frames as images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, MediaInputs, VisionLanguageModel, text_model
from quire.models.vision.grid_layers import check_grid
from quire.models.vision.pixtral import PixtralTower, RowsOfPatches, check_pixtral
from quire.models.vision.towers import TOWERS, FixedGridTower, Projector, build_tower
from quire.types import ImageLayout, MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Rows of a tower that are worth encoding together. Measured with images of 197 rows: two at once take 0.93 of the time
# of one after the other; with three or four, an image takes as long as with two.
ROWS_TOGETHER = 512


class LlavaForConditionalGeneration(VisionLanguageModel):
    # Hugging Face's names before release 4.52 and since then; a CLIP tower had a `vision_model` in it before 5.
    own_renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)", r"vision_tower.\1"),
        (r"(?:model\.)?(multi_modal_projector\..+|image_newline)", r"\1"),
    )

    supported_fields: ClassVar = frozenset({"projector_hidden_act", "multimodal_projector_bias"})
    published_parts: ClassVar = {
        "vision_tower": ("vision_tower.vision_model", "model.vision_tower.vision_model", "model.vision_tower"),
        "multi_modal_projector": ("multi_modal_projector", *["model.multi_modal_projector"] * 2),
        "language_model.{base}": ("language_model.{base}", *["model.language_model"] * 2),
        "language_model.lm_head": ("language_model.lm_head", *["lm_head"] * 2),
    }
    takes_rows: ClassVar = True  # of Pixtral's tower
    takes_frames: ClassVar = True  # where config.json has a token for videos

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        if self.takes_frames:
            self.video_token_id = getattr(config, "video_token_index", None)
        self.vision_tower, self.grid_tower = self.towers(config)
        self.processor_settings = self.grid_tower.settings
        self.multi_modal_projector = self.projector(config)
        # A subclass may make something else of an image: whether its bits stand alone, it has to say itself.
        if isinstance(self.grid_tower, FixedGridTower) and type(self) is LlavaForConditionalGeneration:
            self.images_together = max(1, ROWS_TOGETHER // self.grid_tower.rows)
        self.adopt(text_model(config))

    @classmethod
    def towers(cls, config: PretrainedConfig) -> tuple[nn.Module, FixedGridTower | RowsOfPatches]:
        """The tower, and what is taken of it."""
        from transformers import AutoModel

        if config.vision_config.model_type == "pixtral":
            rows = PixtralTower(config.vision_config)
            return rows, RowsOfPatches(config, rows)
        built = build_tower(lambda: AutoModel.from_config(config.vision_config))
        tower = getattr(built, "vision_model", built)
        return tower, FixedGridTower(config, tower)

    def projector(self, config: PretrainedConfig) -> nn.Module:
        return Projector(config, self.grid_tower.channels)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        vision = config.vision_config
        rows = vision.model_type == "pixtral" and cls.takes_rows
        if rows:
            check_pixtral(config)
        elif vision.model_type not in TOWERS:
            refuse(config, "vision_config", f"its tower must be one of {', '.join(TOWERS)}", vision.model_type)
        if not rows:
            check_grid(config)
        video = getattr(config, "video_token_index", None) if cls.takes_frames else None
        if video is not None and (rows or type(video) is not int or not 0 <= video < 2**31):
            refuse(config, "video_token_index", "it must be a token id, of a model whose frames are all of one size")
        if video is not None and video == config.image_token_index:
            refuse(config, "video_token_index", "it must be another token than images'", video)
        strategy = getattr(config, "vision_feature_select_strategy", "full")
        allowed = ["full"] if rows else ["default", "full"]
        if strategy not in allowed:
            refuse(config, "vision_feature_select_strategy", f"it must be {' or '.join(map(repr, allowed))}")
        layers = config.vision_feature_layer
        layers = [layers] if isinstance(layers, int) else layers
        # Hidden states are those of the embeddings and of each layer.
        count = vision.num_hidden_layers + 1
        if not layers or not all(type(layer) is int and -count <= layer < count for layer in layers):
            refuse(config, "vision_feature_layer", f"it must be one or several of the tower's {count} hidden states")

    def published_names(self, name: str) -> tuple[str, ...]:
        names = super().published_names(name)
        if isinstance(self.grid_tower, RowsOfPatches):  # Pixtral's tower never had a `vision_model` in it
            names = tuple(one.replace("vision_tower.vision_model", "vision_tower") for one in names)
        return names

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        self.grid_tower.read_processor(settings, encode)

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        return self.grid_tower.layout_of(inputs)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        return self.grid_tower.layout(*final)

    def given_layout(self, features: int) -> ImageLayout:
        return self.grid_tower.given_layout(features)

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        return self._project(inputs["pixel_values"])[0]

    def encode_images(self, images: Sequence[ImageInputs]) -> Sequence[torch.Tensor]:
        features = self._project(torch.cat([image["pixel_values"][:1] for image in images]))
        return [one.clone() for one in features]  # else each would keep the memory of all

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        assert isinstance(self.grid_tower, FixedGridTower)
        return MediaLayout(self.frames_of(inputs) * self.grid_tower.tokens)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        self.frames_of(inputs)
        return self._project(inputs["pixel_values_videos"][0]).flatten(0, 1)

    def frames_of(self, inputs: MediaInputs) -> int:
        """Of a video. Raises ValueError for frames that do not fit the tower."""
        assert isinstance(self.grid_tower, FixedGridTower)
        shape, side = tuple(inputs["pixel_values_videos"].shape), self.grid_tower.side
        if len(shape) != 5 or shape[0] != 1 or shape[2:] != (3, side, side):
            raise ValueError(
                f"the video processor makes {list(shape)} of it, and the tower takes frames of [3, {side}, {side}]"
            )
        return shape[1]

    def _project(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, height, width] -> [N, tokens, C]."""
        dtype = next(self.multi_modal_projector.parameters()).dtype
        return self.multi_modal_projector(self.grid_tower(pixels.to(dtype)))
