"""Pixtral's tower (arXiv:2410.07073): images of any shape, as rows of patches that turn by row and column.

An image is computed alone, so that nothing has to be masked. Configuration fields (vision_config): hidden_size,
intermediate_size, num_hidden_layers, num_attention_heads, num_channels, patch_size, hidden_act, and the base of its
rotation, rope_parameters or rope_theta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from quire.errors import CheckpointError
from quire.layers import Linear, RMSNorm, activation
from quire.models.base import refuse
from quire.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EPS = 1e-5  # of all its norms, whatever the configuration says
_ROPE_THETA = 10000.0


class PixtralTower(nn.Module):
    """Modules and parameters are called as in transformers' PixtralVisionModel."""

    def __init__(self, vision: PretrainedConfig) -> None:
        super().__init__()
        self.patch: int = vision.patch_size
        self.patch_conv = nn.Conv2d(vision.num_channels, vision.hidden_size, self.patch, self.patch, bias=False)
        self.ln_pre = RMSNorm(vision.hidden_size, _EPS)
        layers = nn.ModuleList(_Layer(vision) for _ in range(vision.num_hidden_layers))
        self.transformer = nn.ModuleDict({"layers": layers})
        head = vision.hidden_size // vision.num_attention_heads
        with torch.device("cpu"):
            self.frequencies = rope_theta(vision) ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)

    def forward(self, pixels: torch.Tensor, layers: int) -> list[torch.Tensor]:
        """pixels: [1, 3, height, width] -> hidden states [patches, C] before the first layer and after so many."""
        patches = self.patch_conv(pixels)
        rows, columns = patches.shape[-2:]
        x = self.ln_pre(patches.flatten(2)[0].T.contiguous())
        turns = self._turns(rows, columns, x)
        states = [x]
        for layer in islice(self.transformer["layers"].children(), layers):
            states.append(layer(states[-1], turns))
        return states

    def _turns(self, rows: int, columns: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [patches, head]: every second frequency turns by the row, the others by the column."""
        frequencies = self.frequencies.to(like.device)
        down, right = (torch.arange(n, device=like.device).float()[:, None] for n in (rows, columns))
        by_row = (down * frequencies[0::2])[:, None].expand(rows, columns, -1)
        by_column = (right * frequencies[1::2])[None].expand(rows, columns, -1)
        angles = torch.cat((by_row, by_column) * 2, dim=-1).flatten(0, 1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Layer(nn.Module):
    def __init__(self, vision: PretrainedConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(vision.hidden_size, _EPS)
        self.feed_forward = _FeedForward(vision)
        self.attention = _Attention(vision)
        self.ffn_norm = RMSNorm(vision.hidden_size, _EPS)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class _FeedForward(nn.Module):
    def __init__(self, vision: PretrainedConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(vision.hidden_size, vision.intermediate_size, bias=False)
        self.up_proj = Linear(vision.hidden_size, vision.intermediate_size, bias=False)
        self.down_proj = Linear(vision.intermediate_size, vision.hidden_size, bias=False)
        self.activate = activation(vision.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


class _Attention(nn.Module):
    def __init__(self, vision: PretrainedConfig) -> None:
        super().__init__()
        size = vision.hidden_size
        self.heads: int = vision.num_attention_heads
        self.q_proj = Linear(size, size, bias=False)
        self.k_proj = Linear(size, size, bias=False)
        self.v_proj = Linear(size, size, bias=False)
        self.o_proj = Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query, key, value = (
            project(x).view(len(x), self.heads, -1).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _turned(query, *turns), _turned(key, *turns)
        y = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        return self.o_proj(y.transpose(0, 1).reshape(x.shape))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_theta(vision: PretrainedConfig) -> float:
    parameters = getattr(vision, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(vision, "rope_theta", None) or _ROPE_THETA)


def check_pixtral(config: PretrainedConfig) -> None:
    """Refuse a tower, or a choice of its hidden states, that is not served. Raises UnsupportedModelError."""
    vision = config.vision_config
    for field in ("patch_size", "num_channels", "num_hidden_layers", "hidden_size", "intermediate_size"):
        if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
            refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
    if vision.num_channels != 3:
        refuse(config, "vision_config.num_channels", "images have 3", vision.num_channels)
    heads = vision.num_attention_heads
    if type(heads) is not int or heads < 1 or vision.hidden_size % (4 * heads):
        refuse(config, "vision_config.num_attention_heads", "a head must be a multiple of 4 of hidden_size", heads)
    rope = (getattr(vision, "rope_parameters", None) or {}).get("rope_type", "axial")
    if rope not in ("axial", "default"):
        refuse(config, "vision_config.rope_parameters", "its rope_type must be 'axial'", rope)


class RowsOfPatches:
    """What an image takes in a prompt, and its features before they are projected: a feature for each group of
    `merge` x `merge` patches, a token that breaks between rows, and another behind the last.

    It is no module: `tower` belongs to the model. layers: the hidden states that are taken, side by side.
    """

    def __init__(self, config: PretrainedConfig, tower: PixtralTower, merge: int = 1) -> None:
        layer, count = config.vision_feature_layer, config.vision_config.num_hidden_layers + 1
        self.tower = tower
        self.merge = merge
        self.unit = tower.patch * merge
        self.layers = [one % count for one in ([layer] if isinstance(layer, int) else layer)]
        self.channels: int = config.vision_config.hidden_size * len(self.layers)
        self.marker: int = config.image_token_id
        self.breaks: tuple[int, int] | None = None  # the ids between rows and behind the last

    @property
    def settings(self) -> dict[str, Any]:
        return {"patch_size": {"height": self.unit, "width": self.unit}}

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        """As `VisionLanguageModel.read_processor`."""
        said = settings.get("patch_size", self.tower.patch), settings.get("spatial_merge_size", self.merge)
        if said[0] * said[1] != self.unit:
            raise CheckpointError(
                f"processor_config.json's patch_size={said[0]} and spatial_merge_size={said[1]} are not config.json's "
                f"{self.tower.patch} and {self.merge}."
            )
        found = []
        for name, usual in (("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]")):
            text = settings.get(name) or usual
            ids = encode(text)
            if len(ids) != 1:
                raise CheckpointError(f"the tokenizer has no token {text!r}, which the model's images need ({name}).")
            found.append(ids[0])
        self.breaks = found[0], found[1]

    def layout_of(self, inputs: Mapping[str, torch.Tensor]) -> ImageLayout:
        """Of one image, as the image processor returns it, or of an `image_grid_thw` alone, in patches."""
        if "image_grid_thw" in inputs:
            time, *sides = inputs["image_grid_thw"][0].tolist()
            if time != 1 or any(side < self.merge or side % self.merge for side in sides):
                raise ValueError(f"its grid of patches must be [1, a multiple of {self.merge}, another]")
            return self.layout(sides[0] * self.tower.patch, sides[1] * self.tower.patch)
        shape = tuple(inputs["pixel_values"].shape)
        if len(shape) != 4 or shape[:2] != (1, 3):
            raise ValueError(f"the image processor makes {list(shape)} of it, and the tower takes [1, 3, ...]")
        return self.layout(*shape[2:])

    def layout(self, height: int, width: int) -> ImageLayout:
        """Of pixels of this size."""
        rows, columns = height // self.unit, width // self.unit
        if not rows or not columns:
            raise ValueError(f"the image processor makes {height} x {width} of it, less than a group of patches")
        assert self.breaks is not None, "read_processor comes first"
        between, behind = self.breaks
        ids = (*[self.marker] * columns, between) * rows
        mask = (*[True] * columns, False) * rows
        return ImageLayout(len(ids), ids=(*ids[:-1], behind), mask=mask)

    def given_layout(self, features: int) -> ImageLayout:
        raise ValueError("this model's images have rows: image_embeds must come with their image_grid_thw")

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: [1, 3, height, width] -> [1, patches, channels]."""
        states = self.tower(pixels, max(self.layers))
        return torch.cat([states[layer] for layer in self.layers], dim=-1)[None]
