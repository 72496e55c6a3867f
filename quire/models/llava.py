"""LLaVA (arXiv:2304.08485, 2310.03744): a fixed grid of a tower's patches, projected, is one image.

Configuration fields that shape the arithmetic: vision_config (CLIP or SigLIP), text_config (any text model of the
registry), vision_feature_layer, vision_feature_select_strategy, projector_hidden_act, multimodal_projector_bias,
image_token_index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, VisionLanguageModel, text_model
from quire.models.vision.towers import TOWERS, FixedGridTower, Projector, build_tower
from quire.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LlavaForConditionalGeneration(VisionLanguageModel):
    # Hugging Face's names before release 4.52 and since then; a CLIP tower had a `vision_model` in it before 5.
    own_renames: ClassVar = (
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

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        from transformers import AutoModel

        tower = build_tower(lambda: AutoModel.from_config(config.vision_config))
        self.vision_tower = getattr(tower, "vision_model", tower)
        self.grid_tower = FixedGridTower(config, self.vision_tower)
        self.multi_modal_projector = Projector(config, self.grid_tower.channels)
        self.adopt(text_model(config))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        vision = config.vision_config
        if vision.model_type not in TOWERS:
            refuse(config, "vision_config", f"its tower must be one of {', '.join(TOWERS)}", vision.model_type)
        for field in ("image_size", "patch_size", "num_channels", "num_hidden_layers", "hidden_size"):
            if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
                refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
        if config.vision_feature_select_strategy not in ("default", "full"):
            refuse(config, "vision_feature_select_strategy", "it must be 'default' or 'full'")
        layers = config.vision_feature_layer
        layers = [layers] if isinstance(layers, int) else layers
        # Hidden states are those of the embeddings and of each layer.
        count = vision.num_hidden_layers + 1
        if not layers or not all(type(layer) is int and -count <= layer < count for layer in layers):
            refuse(config, "vision_feature_layer", f"it must be one or several of the tower's {count} hidden states")

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        self._check_pixels(inputs["pixel_values"])
        return ImageLayout(self.grid_tower.tokens)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        self._check_sides((3, *final))
        return ImageLayout(self.grid_tower.tokens)

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        return self._project(inputs["pixel_values"])[0]

    def _check_pixels(self, pixels: torch.Tensor) -> None:
        self._check_sides(tuple(pixels.shape[-3:]))

    def _check_sides(self, sides: tuple[int, ...]) -> None:
        side = self.grid_tower.side
        if sides != (3, side, side):
            raise ValueError(f"the image processor makes {list(sides)} of it, and the tower takes [3, {side}, {side}]")

    def _project(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, side, side] -> [N, tokens, C]."""
        dtype = self.multi_modal_projector.linear_1.weight.dtype
        return self.multi_modal_projector(self.grid_tower(pixels.to(dtype)))
