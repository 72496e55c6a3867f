"""Layers of towers over one grid of patches: CLIP's (arXiv:2103.00020) and SigLIP's (arXiv:2303.15343).

Their embeddings stay transformers' own but for the convolution, which is a product of patches. A layer of theirs is
taken apart, and what it is made of put together again on quire's kernels, under the same names: two norms, one product
for query, key and value, attention of an image's rows among themselves, and a feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quire import kernels
from quire.layers import Linear, MergedLinear, Segments
from quire.models.base import refuse
from quire.models.vision.tower_parts import PatchConvolution, feed_forward, own_norm

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_grid(config: PretrainedConfig) -> None:
    """Refuse sizes that are none, and images without a patch. Raises UnsupportedModelError."""
    vision = config.vision_config
    for field in ("image_size", "patch_size", "num_channels", "num_hidden_layers", "hidden_size"):
        if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
            refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
    if vision.patch_size > vision.image_size:
        reason = f"an image of {vision.image_size} pixels a side would have no patch"
        refuse(config, "vision_config.patch_size", reason, vision.patch_size)


def use_grid_layers(tower: Any, hidden_act: str) -> None:
    """Have a tower's layers, its patch embedding and the norms around them computed by quire's kernels.

    hidden_act: of the layers' feed-forwards. Raises UnsupportedModelError for one that quire does not know.
    """
    tower.embeddings.patch_embedding = PatchConvolution(tower.embeddings.patch_embedding)
    for number, layer in enumerate(tower.encoder.layers):
        tower.encoder.layers[number] = GridLayer(layer, hidden_act)
    for name in ("pre_layrnorm", "post_layernorm"):  # the first is CLIP's alone, and spelt so in its checkpoints
        if hasattr(tower, name):
            setattr(tower, name, own_norm(getattr(tower, name)))


def rows_of_images(x: torch.Tensor) -> tuple[torch.Tensor, Segments]:
    """x: [N, R, C] -> [N * R, C], contiguous, and where each image's rows lie."""
    count, rows = x.shape[:2]
    return x.flatten(0, 1).contiguous(), Segments(torch.arange(0, (count + 1) * rows, rows, device="cpu"))


class GridLayer(nn.Module):
    """Pre-norm: layer_norm1, self_attn, layer_norm2 and mlp of one layer."""

    def __init__(self, layer: Any, hidden_act: str) -> None:
        super().__init__()
        self.layer_norm1 = own_norm(layer.layer_norm1)
        self.self_attn = _Attention(layer.self_attn)
        self.layer_norm2 = own_norm(layer.layer_norm2)
        self.mlp = feed_forward(layer.mlp, hidden_act)

    def forward(self, x: torch.Tensor, segments: Segments) -> None:
        """x: [T, C] contiguous, the images' rows, which the layer writes to."""
        y = self.layer_norm2(x, self.self_attn(self.layer_norm1(x), segments))
        kernels.add_to(x, self.mlp(y))


class _Attention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj: Linear = attention.q_proj
        self.k_proj: Linear = attention.k_proj
        self.v_proj: Linear = attention.v_proj
        self.out_proj: Linear = attention.out_proj
        self._qkv = MergedLinear(self.q_proj, self.k_proj, self.v_proj)
        self.heads: int = attention.num_heads
        self.scale = (self.q_proj.out_features // self.heads) ** -0.5

    def forward(self, x: torch.Tensor, segments: Segments) -> torch.Tensor:
        query, key, value = self._qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        return self.out_proj(segments.attend(query, key, value, self.scale).view(len(x), -1))
