"""SigLIP's tower (arXiv:2303.15343) to its end: what stands behind its last layer's norm is not computed; and the
attention of the head that stands there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from quire.models.base import refuse
from quire.models.vision.grid_layers import check_grid, rows_of_images, use_grid_layers
from quire.models.vision.towers import TowerLinear, build_tower

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of models that have this tower, one projector and the text model's head outside of the model proper: what their files
# called these parts, and what transformers' releases do (`VisionLanguageModel.own_renames`, `published_parts`).
RENAMES: Sequence[tuple[str, str]] = (
    (r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)", r"vision_tower.\1"),
    (r"(?:model\.)?(multi_modal_projector\..+)", r"\1"),
)
PUBLISHED_PARTS: Mapping[str, tuple[str, ...]] = {
    "vision_tower": ("vision_tower.vision_model", "model.vision_tower.vision_model", "model.vision_tower"),
    "multi_modal_projector": ("multi_modal_projector", *["model.multi_modal_projector"] * 2),
    "language_model.{base}": ("language_model.{base}", *["model.language_model"] * 2),
    "language_model.lm_head": ("language_model.lm_head", *["lm_head"] * 2),
}


def check_siglip(config: PretrainedConfig) -> None:
    """Refuse another tower, and sizes that are none. Raises UnsupportedModelError."""
    vision = config.vision_config
    if vision.model_type != "siglip_vision_model":
        refuse(config, "vision_config", "its tower must be 'siglip_vision_model'", vision.model_type)
    check_grid(config)


class SiglipTower:
    """It is no module: `tower`, transformers', belongs to the model."""

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers import AutoModel

        vision = config.vision_config
        built = build_tower(lambda: AutoModel.from_config(vision))
        self.tower: Any = getattr(built, "vision_model", built)
        self.side: int = vision.image_size
        self.patches: int = (vision.image_size // vision.patch_size) ** 2
        use_grid_layers(self.tower, vision.hidden_act)

    def check_sides(self, sides: tuple[int, ...]) -> None:
        """Of what the image processor makes of an image. Raises ValueError where that is not the tower's."""
        side = self.side
        if sides != (3, side, side):
            raise ValueError(f"the image processor makes {list(sides)} of it, and the tower takes [3, {side}, {side}]")

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: [N, 3, side, side] -> [N, patches, C]."""
        embedded = self.tower.embeddings(pixels)
        x, segments = rows_of_images(embedded)
        for layer in self.tower.encoder.layers:
            layer(x, segments)
        y: torch.Tensor = self.tower.post_layernorm(x)
        return y.view(embedded.shape)


class HeadAttention(nn.Module):
    """In the place of torch's MultiheadAttention, whose products are torch's: called as that is.

    Its layers have names of their own: PEFT's adapters of that module's `out_proj` change nothing there.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.inputs = TowerLinear(hidden, 3 * hidden)
        self.out = TowerLinear(hidden, hidden)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        """query: [N, Q, C]; key and value: the same [N, P, C] -> ([N, Q, C], no weights)."""
        own = self.inputs(query)[..., : self.hidden]
        others = self.inputs(key)[..., self.hidden :].chunk(2, -1)
        parts = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (own, *others))
        attended = functional.scaled_dot_product_attention(*parts)
        return self.out(attended.transpose(1, 2).flatten(2)), None
