"""Vision towers: transformers' own modules, with quire's linear layers in the place of torch's; of CLIP's and SigLIP's,
whole layers (`grid_layers.py`).

So each of their matrix products goes through the same layer as the text model's, and is as exact in this: an image's
features do not depend on what else is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.errors import UnsupportedModelError
from quire.layers import Linear, activation
from quire.models.vision.grid_layers import rows_of_images, use_grid_layers
from quire.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Towers whose hidden states are those of plain transformer layers over one fixed grid of patches; whether the first
# of them belongs to no patch (CLIP's class token).
TOWERS = {"clip_vision_model": True, "siglip_vision_model": False}
_MOST_COUNTED = 1 << 22  # numbers in a row that a tower computes for itself


def build_tower(make: Callable[[], nn.Module]) -> nn.Module:
    """Return what `make` builds, parameters on the meta device (the caller's context), buffers real.

    Raises UnsupportedModelError for a module with buffers that are neither loaded nor computed.
    """
    with _RealNumbers():
        tower = make()
    _use_own_linears(tower)
    for name, buffer in tower.named_buffers():
        if buffer.is_meta:
            raise UnsupportedModelError(f"{type(tower).__name__}: the buffer {name!r} has no values before loading.")
    return tower


class _RealNumbers(TorchFunctionMode):
    """On the meta device, counted positions and frequencies are real all the same: no file brings them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange and func(*args, **{**kwargs, "device": "meta"}).numel() > _MOST_COUNTED:
            raise UnsupportedModelError(
                f"config.json: vision_config asks for more than {_MOST_COUNTED:,} positions or frequencies: its "
                "image_size, patch_size or hidden_size cannot be right."
            )
        if func in (torch.arange, torch.tensor):
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


class TowerLinear(Linear):
    """Linear for any number of leading dimensions. Transformers' towers ask its weight for a dtype and a device alone:
    it may be packed."""

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        return super().forward(flat, out_dtype).view(*x.shape[:-1], self.out_features)


def _use_own_linears(module: nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, TowerLinear(child.in_features, child.out_features, child.bias is not None))
        else:
            _use_own_linears(child)


class FixedGridTower:
    """What LLaVA takes of a CLIP or SigLIP tower: hidden states of chosen layers, side by side, with or without the
    first token.

    It is no module: `tower` belongs to the model. Layers behind the last that is chosen are not computed, nor what
    stands behind all of them. Fields: vision_feature_layer (one index or several) and vision_feature_select_strategy
    ("default" leaves out the first token, "full" nothing).
    """

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: PretrainedConfig, tower: nn.Module) -> None:
        vision = config.vision_config
        layer = config.vision_feature_layer
        states = range(vision.num_hidden_layers + 1)  # those of the embeddings and of each layer
        self.layers: list[int] = [states[one] for one in ([layer] if isinstance(layer, int) else layer)]
        self.first = {"default": 1, "full": 0}[config.vision_feature_select_strategy]
        self.tower: Any = tower
        self.side: int = vision.image_size
        self.grid: int = vision.image_size // vision.patch_size
        self.rows = self.grid**2 + TOWERS[vision.model_type]  # of an image, in each layer
        self.tokens = self.rows - self.first
        self.channels: int = vision.hidden_size * len(self.layers)
        use_grid_layers(tower, vision.hidden_act)

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        """As `VisionLanguageModel.read_processor`: nothing is around its features."""

    def layout_of(self, inputs: Mapping[str, torch.Tensor]) -> ImageLayout:
        """Of one image, as the image processor returns it."""
        self.check_sides(tuple(inputs["pixel_values"].shape[-3:]))
        return ImageLayout(self.tokens)

    def layout(self, height: int, width: int) -> ImageLayout:
        """Of pixels of this size."""
        self.check_sides((3, height, width))
        return ImageLayout(self.tokens)

    def given_layout(self, features: int) -> ImageLayout:
        return ImageLayout(features)

    def check_sides(self, sides: tuple[int, ...]) -> None:
        side = self.side
        if sides != (3, side, side):
            raise ValueError(f"the image processor makes {list(sides)} of it, and the tower takes [3, {side}, {side}]")

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels: [N, 3, side, side] -> [N, tokens, channels]."""
        x = self.tower.embeddings(pixels)
        shape = x.shape
        x, segments = rows_of_images(x)
        if hasattr(self.tower, "pre_layrnorm"):  # CLIP's
            x = self.tower.pre_layrnorm(x)
        last = max(self.layers)
        states = {last: x}  # in the end; layers write to it
        if 0 in self.layers and last > 0:
            states[0] = x.clone()
        for number, layer in enumerate(self.tower.encoder.layers[:last], 1):
            layer(x, segments)
            if number in self.layers and number < last:
                states[number] = x.clone()
        chosen = [states[number].view(shape)[:, self.first :] for number in self.layers]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


class Projector(nn.Module):
    """LLaVA's two layers from the tower's channels to the text model's."""

    def __init__(self, config: PretrainedConfig, channels: int) -> None:
        super().__init__()
        hidden, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1 = Linear(channels, hidden, bias=bias)
        self.linear_2 = Linear(hidden, hidden, bias=bias)
        self.activate = activation(config.projector_hidden_act)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[N, tokens, channels] -> [N, tokens, C]."""
        flat = features.reshape(-1, features.shape[-1]).contiguous()
        return self.linear_2(self.activate(self.linear_1(flat))).view(*features.shape[:-1], -1)
