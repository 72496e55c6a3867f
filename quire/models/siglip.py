"""SigLIP (arXiv:2303.15343), and SigLIP 2 (arXiv:2502.14786) with images of one size, which is the same architecture.

As CLIP, but: a text's tokens see one another, and are as many for every text, padding included; the last one's row is
projected, be it padding's. The vector of an image is attention's with one query, a parameter, over its patches.

Configuration fields that shape the arithmetic are those of CLIP, but for projection_dim, and text_config's pad_token_id
and projection_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.layers import Linear
from quire.models.base import refuse
from quire.models.clip import ClipModel
from quire.models.vision.siglip import HeadAttention
from quire.pooling_types import TowerPrompts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SiglipModel(ClipModel):
    """SigLIP, and SigLIP 2 with images of one size: vectors of texts and of images, with both towers."""

    bidirectional = True
    vision_kind: ClassVar[str] = "siglip_vision_model"
    checkpoint_renames: Sequence[tuple[str, str]] = (
        (r"(vision_model\.head\.attention\.)in_proj_(weight|bias)", r"\1inputs.\2"),
        (r"(vision_model\.head\.attention\.)out_proj\.(weight|bias)", r"\1out.\2"),
    )
    adapters_ignored: Sequence[str] = (r"vision_model\.head\.attention\.out_proj(?:\..+)?",)  # in PEFT's models, too

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        text, vision = config.text_config, config.vision_config
        if not vision.vision_use_head:
            refuse(config, "vision_config.vision_use_head", "without a head the tower has no vector of an image", False)
        if text.projection_size != vision.hidden_size:
            refuse(config, "text_config.projection_size", "it must be vision_config.hidden_size", text.projection_size)

    @classmethod
    def image_tower(cls, vision: PretrainedConfig) -> nn.Module:
        tower: Any = super().image_tower(vision)
        tower.head.attention = HeadAttention(vision.hidden_size, vision.num_attention_heads)
        return tower

    def add_projection(self, config: PretrainedConfig) -> None:
        tower: Any = self.text_model
        tower.head = Linear(config.text_config.hidden_size, config.text_config.projection_size)

    def prompts(self, text: PretrainedConfig) -> TowerPrompts:
        return TowerPrompts(length=text.max_position_embeddings, padding=text.pad_token_id)

    @property
    def width(self) -> int:
        config: Any = self.config
        return int(config.text_config.projection_size)

    def pool(self, rows: torch.Tensor) -> torch.Tensor:
        tower: Any = self.text_model
        y: torch.Tensor = tower.head(rows, torch.float32)
        return y

    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled
