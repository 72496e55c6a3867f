"""InternVL 2.5 and 3 (arXiv:2412.05271, arXiv:2504.10479), in Hugging Face's form: tiles of an image, and all of it.

Each tile is a fixed grid of patches, of which a square of four becomes one feature. A video's frames are images of one
tile, each behind its number. Configuration fields that shape the arithmetic: vision_config (all of InternVL's tower),
text_config, vision_feature_layer, downsample_ratio, projector_hidden_act, image_token_id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers import LayerNorm, Linear, activation
from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, MediaInputs, text_model
from quire.models.vision.towers import build_tower
from quire.models.vision.video import FramesAsImages, between, layout_of
from quire.types import ImageLayout, MediaLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_START, _END = "<img>", "</img>"
_EPS = 1e-5  # of the projector's norm, whatever the configuration says


class InternVLForConditionalGeneration(FramesAsImages):
    own_renames: ClassVar = (
        (r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)", r"vision_tower.\1"),
        (r"(?:model\.)?(multi_modal_projector\..+)", r"\1"),
    )
    supported_fields: ClassVar = frozenset({"projector_hidden_act"})
    published_parts: ClassVar = {
        "vision_tower": ("vision_tower", "model.vision_tower"),
        "multi_modal_projector": ("multi_modal_projector", "model.multi_modal_projector"),
        "language_model.{base}": ("language_model.{base}", "model.language_model"),
        "language_model.lm_head": ("language_model.lm_head", "lm_head"),
    }
    processor_settings: Mapping[str, Any] = {"crop_to_patches": True}
    around_video_marker = ("Frame1: ", "")

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        from transformers import AutoModel

        vision = config.vision_config
        self.vision_tower: Any = build_tower(lambda: AutoModel.from_config(vision))
        self.multi_modal_projector = InternVLProjector(config)
        self.side, patch = vision.image_size[0], vision.patch_size[0]
        self.grid: int = self.side // patch
        self.group = round(1 / config.downsample_ratio)
        if self.grid % self.group:
            refuse(config, "downsample_ratio", f"a tile's {self.grid} patches a side must be a multiple of its groups")
        self.tile_features: int = (self.grid // self.group) ** 2
        layer = config.vision_feature_layer
        self.is_last = layer == -1  # which the norm behind the layers is for
        self.layers: int = layer % (vision.num_hidden_layers + 1)
        self.around: tuple[int, int] | None = None
        self._encode: Callable[[str], list[int]] | None = None
        self.adopt(text_model(config))

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        vision, layer = config.vision_config, config.vision_feature_layer
        if vision.model_type != "internvl_vision":
            refuse(config, "vision_config", "its tower must be 'internvl_vision'", vision.model_type)
        for field in ("image_size", "patch_size"):
            sides = getattr(vision, field)
            if len(sides) != 2 or sides[0] != sides[1] or type(sides[0]) is not int or sides[0] < 1:
                refuse(config, f"vision_config.{field}", "it must be a square's side, above 0", sides)
        for field in ("num_channels", "num_hidden_layers", "hidden_size"):
            if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
                refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
        if config.vision_feature_select_strategy != "default":
            refuse(config, "vision_feature_select_strategy", "it must be 'default': the first token is no patch's")
        count = vision.num_hidden_layers + 1  # hidden states are those of the embeddings and of each layer
        if type(layer) is not int or not -count <= layer < count:
            refuse(config, "vision_feature_layer", f"it must be one of the tower's {count} hidden states")
        ratio = config.downsample_ratio
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1 or 1 / ratio != round(1 / ratio):
            refuse(config, "downsample_ratio", "it must be 1 divided by a whole number")

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        length = settings.get("image_seq_length", self.tile_features)
        if length != self.tile_features:
            raise CheckpointError(
                f"processor_config.json's image_seq_length={length} is not the {self.tile_features} features that "
                "config.json's tower and downsample_ratio make of a tile."
            )
        found = []
        for text in (_START, _END):
            ids = encode(text)
            if len(ids) != 1:
                raise CheckpointError(f"the tokenizer has no token {text!r}, which stands around the model's images.")
            found.append(ids[0])
        self.around = found[0], found[1]
        self._encode = encode
        self.read_video_marker(encode)

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        tiles, *sides = inputs["pixel_values"].shape
        if sides != [3, self.side, self.side]:
            raise ValueError(
                f"the image processor makes {sides} of it, and the tower takes {[3, self.side, self.side]}"
            )
        return self.given_layout(tiles * self.tile_features)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        if final[0] % self.side or final[1] % self.side:
            raise ValueError(f"the image processor makes tiles of {final} of it, and the tower's side is {self.side}")
        tiles = final[0] * final[1] // self.side**2
        return self.given_layout((tiles + (tiles > 1)) * self.tile_features)

    def given_layout(self, features: int) -> ImageLayout:
        assert self.around is not None, "read_processor comes first"
        start, end = self.around
        assert self.image_token_id is not None
        ids = (start, *[self.image_token_id] * features, end)
        return ImageLayout(features + 2, ids=ids, mask=(False, *[True] * features, False))

    def video_layout(self, inputs: MediaInputs) -> MediaLayout:
        """The first frame's number stands before the marker."""
        _, frames, *sides = inputs["pixel_values_videos"].shape
        if sides != [3, self.side, self.side]:
            raise ValueError(
                f"the video processor makes {sides} of it, and the tower takes {[3, self.side, self.side]}"
            )
        assert self._encode is not None, "read_processor comes first"
        frame = self.given_layout(self.tile_features).ids or ()
        ids = list(frame)
        for number in range(2, frames + 1):
            ids += [*between(self._encode, _END, f"\nFrame{number}: ", _START), *frame]
        return layout_of(ids, self.image_token_id)

    def encode_video(self, inputs: MediaInputs) -> torch.Tensor:
        return self.encode({"pixel_values": inputs["pixel_values_videos"][0]})

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        pixels = inputs["pixel_values"].to(self.dtype)
        return self.multi_modal_projector(self._shuffled(self._patches(pixels)))

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, 3, side, side] -> [N, patches, C]. Layers behind the one that is asked for are not computed."""
        x = _first(self.vision_tower.embeddings(pixels))
        for layer in self.vision_tower.encoder.layer[: self.layers]:
            x = _first(layer(x))
        return (self.vision_tower.layernorm(x) if self.is_last else x)[:, 1:]

    def _shuffled(self, patches: torch.Tensor) -> torch.Tensor:
        """[N, patches, C] -> [N * groups, group * group * C]: the patches of a square side by side, row by row."""
        tiles, _, channels = patches.shape
        group, rows = self.group, self.grid // self.group
        squares = patches.view(tiles, rows, group, rows, group, channels).transpose(2, 3)
        return squares.reshape(tiles * rows * rows, group * group * channels)


def _first(result: Any) -> torch.Tensor:
    """Before transformers 5, parts of the tower returned tuples."""
    return result if isinstance(result, torch.Tensor) else result[0]


class InternVLProjector(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden = config.text_config.hidden_size
        channels = config.vision_config.hidden_size * round(1 / config.downsample_ratio) ** 2
        self.layer_norm = LayerNorm(channels, _EPS)
        self.linear_1 = Linear(channels, hidden)
        self.linear_2 = Linear(hidden, hidden)
        self.activate = activation(config.projector_hidden_act)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[groups, channels] -> [groups, C]."""
        return self.linear_2(self.activate(self.linear_1(self.layer_norm(features))))
