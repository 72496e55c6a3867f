"""Idefics3 (arXiv:2408.12637): an image in tiles, each told by its row and column.

Squares of `scale_factor` x `scale_factor` of a tile's patches become one feature, whose numbers lie side by side before
the projection. Before each tile stands a token, and its place as a text ("<row_1_col_2>"), which is one token or many,
as the checkpoint's tokenizer has it; the image as a whole comes last ("<global-img>"). Configuration fields that shape
the arithmetic: vision_config, text_config (any text model of the registry), scale_factor, image_token_id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers import Linear
from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, VisionLanguageModel, text_model
from quire.models.vision.towers import build_tower
from quire.types import ImageLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MARKER, AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
_MOST_LAYOUTS = 1024  # remembered, by rows and columns


class Idefics3ForConditionalGeneration(VisionLanguageModel):
    supported_fields: ClassVar = frozenset({"scale_factor"})
    own_renames: ClassVar = ((r"model\.((?:vision_model|connector)\..+)", r"\1"),)
    published_parts: ClassVar = {
        "vision_model": ("model.vision_model",),
        "connector": ("model.connector",),
        "language_model.{base}": ("model.text_model",),
        "language_model.lm_head": ("lm_head",),
    }

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        vision = config.vision_config
        self.vision_model = build_tower(lambda: self.make_tower(vision))
        self.side: int = vision.image_size
        self.grid: int = vision.image_size // vision.patch_size
        self.factor: int = config.scale_factor
        self.features: int = (self.grid // self.factor) ** 2  # of a tile
        self.connector = Connector(config)
        self.adopt(text_model(config))
        self._encode: Callable[[str], list[int]] | None = None
        self._layouts: dict[tuple[int, int], ImageLayout] = {}

    def make_tower(self, vision: PretrainedConfig) -> nn.Module:
        """Transformers' tower for this configuration."""
        from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

        return Idefics3VisionTransformer._from_config(vision)

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        vision = config.vision_config
        for field in ("image_size", "patch_size", "num_channels", "num_hidden_layers", "hidden_size"):
            if type(getattr(vision, field)) is not int or getattr(vision, field) < 1:
                refuse(config, f"vision_config.{field}", "it must be a whole number above 0", getattr(vision, field))
        grid, factor = vision.image_size // vision.patch_size, config.scale_factor
        if type(factor) is not int or factor < 1 or grid < factor or grid % factor:
            refuse(config, "scale_factor", f"it must divide a tile's {grid} patches a side", factor)

    def read_processor(self, settings: Mapping[str, Any], encode: Callable[[str], list[int]]) -> None:
        if settings.get("image_seq_len", self.features) != self.features:
            raise CheckpointError(
                f"processor_config.json: image_seq_len={settings['image_seq_len']}, and config.json makes "
                f"{self.features} features of a tile."
            )
        if encode(_MARKER) != [self.image_token_id]:
            raise CheckpointError(
                f"the tokenizer makes {encode(_MARKER)[:5]} of {_MARKER!r}, which config.json says is image_token_id="
                f"{self.image_token_id}: tokenizer and model do not belong together."
            )
        self._encode = encode
        self._layouts.clear()

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        edge = dict(settings.get("max_image_size") or {}).get("longest_edge", self.side)
        if edge != self.side:
            raise CheckpointError(
                f"the image processor's max_image_size is {edge}, and config.json's vision_config.image_size "
                f"{self.side}: its tiles do not fit the tower."
            )

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        shape, (rows, columns) = tuple(inputs["pixel_values"].shape[1:]), self._tiles(inputs)
        if shape != (max(1, rows * columns + bool(rows)), 3, self.side, self.side):
            raise ValueError(
                f"the image processor makes {list(shape)} of it in {rows} x {columns} tiles, and the tower takes "
                f"[3, {self.side}, {self.side}] of each and of the whole"
            )
        return self._layout(rows, columns)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        if any(edge % self.side for edge in final):
            raise ValueError(f"the image processor makes {list(final)} of it, and the tower takes tiles of {self.side}")
        rows, columns = (edge // self.side for edge in final)
        return self.one_tile if rows == columns == 1 else self._layout(rows, columns)

    def given_layout(self, features: int) -> ImageLayout:
        if features != self.features:
            raise ValueError(
                f"image_embeds has {features} rows; an image without tiles has {self.features}, and of one in tiles "
                "they do not tell its rows and columns: give the image itself"
            )
        return self.one_tile

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        tiles = inputs["pixel_values"][0].to(self.dtype)
        states = self.vision_model(tiles).last_hidden_state
        return self.connector(states).flatten(0, 1)

    def _tiles(self, inputs: ImageInputs) -> tuple[int, int]:
        """Rows and columns of the image's tiles; none where it is one tile."""
        return int(inputs["rows"].reshape(())), int(inputs["cols"].reshape(()))

    @property
    def one_tile(self) -> ImageLayout:
        """Of an image without tiles."""
        return self._layout(0, 0)

    def token_ids(self, text: str) -> list[int]:
        """By the checkpoint's tokenizer."""
        if self._encode is None:
            raise RuntimeError("read_processor has not been called")
        return self._encode(text)

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        layout = self._layouts.get((rows, columns))
        if layout is None:
            ids = tuple(self.token_ids(self._text(rows, columns)))
            layout = ImageLayout(len(ids), ids=ids, mask=tuple(token == self.image_token_id for token in ids))
            if layout.features != (rows * columns + 1) * self.features:
                raise ValueError("the checkpoint's tokenizer reads the tokens around an image as placeholders")
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[rows, columns] = layout
        return layout

    def _text(self, rows: int, columns: int) -> str:
        """What stands for an image in a prompt, as the checkpoint's processor writes it."""
        tile, text = _MARKER * self.features, ""
        for row in range(1, rows + 1):
            text += "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        return text + ("\n" if rows else "") + AROUND + _WHOLE + tile + AROUND


class Connector(nn.Module):
    """Squares of patches side by side, projected to the text model's width."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.factor: int = config.scale_factor
        channels = config.vision_config.hidden_size * self.factor**2
        self.modality_projection = Projection(channels, config.text_config.hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[N, side * side patches, C] -> [N, patches / factor**2, E]."""
        count, patches, channels = states.shape
        side, factor = int(patches**0.5), self.factor
        squares = states.view(count, side // factor, factor, side // factor, factor, channels).transpose(2, 3)
        rows = squares.reshape(-1, factor * factor * channels)
        return self.modality_projection.proj(rows).view(count, patches // factor**2, -1)


class Projection(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.proj = Linear(channels, hidden, bias=False)
