"""Phi-3-vision and Phi-3.5-vision (arXiv:2404.14219): an image in crops, and once more as a whole; Phi-3 reads it.

Of the tower's patches, squares of two by two lie side by side in one feature. The crops' features are put together to
one picture; each row of it ends in a learned `sub_GN`, and `glb_GN` stands between it and the image as a whole. The
configuration's class comes with the checkpoints as code, which is never run: `Phi3VConfig` stands for it. Its fields
that shape the arithmetic, beyond Phi-3's: img_processor, embd_layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import CLIPVisionConfig, Phi3Config, PretrainedConfig

from quire.errors import CheckpointError
from quire.layers import Linear, activation
from quire.models.base import refuse
from quire.models.vision.base import ImageInputs, VisionLanguageModel, text_model
from quire.models.vision.grid_layers import check_grid
from quire.models.vision.towers import FixedGridTower, build_tower
from quire.types import ImageLayout

if TYPE_CHECKING:
    from quire.checkpoint.files import Checkpoint

# The tower that published checkpoints name and do not describe.
_NAMED = "openai/clip-vit-large-patch14-336"
_TOWER: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "projection_dim": 768, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
# Of config.json, what is not the text model's.
_OWN = frozenset({"architectures", "auto_map", "model_type", "embd_layer", "img_processor", "vision_config",
                  "image_token_id", "_name_or_path"})  # fmt: skip
# What img_processor and embd_layer may say, and what they mean where they do not say it; None: it is looked at apart.
_IMG_PROCESSOR: Mapping[str, tuple[Any, ...] | None] = {
    "name": ("clip_vision_model",), "model_name": (_NAMED, None), "type_feature": ("patch", None), "layer_idx": None,
    "image_dim_out": None, "num_img_tokens": None,
}  # fmt: skip
_EMBD_LAYER: Mapping[str, tuple[Any, ...] | None] = {
    "embedding_cls": ("image", None), "use_hd_transform": (True,), "with_learnable_separator": (True,),
    "projection_cls": ("mlp",), "hd_transform_order": ("sub_glb", "glb_sub", None),
}  # fmt: skip

_TABLE, _SAME_TABLE = "model.embed_tokens.weight", "model.vision_embed_tokens.wte.weight"
_TWO_TABLES = (
    "the published code reads prompts with images by a second name of this table (vision_embed_tokens.wte), which PEFT "
    "leaves as it was: merge the adapter into the checkpoint, or train it without the embeddings"
)


class Phi3VConfig(PretrainedConfig):  # type: ignore[misc]  # transformers gives it no type
    """config.json has Phi-3's fields beside what is told of images; here they are `text_config`'s too.

    vision_config: the tower's; published files leave it out and name a tower. image_token_id: what stands in the places
    of an image's features, where the published code has -1, -2 and so on; the token "<|image|>".
    """

    model_type = "phi3_v"
    sub_configs: ClassVar[Mapping[str, Any]] = {"text_config": Phi3Config, "vision_config": CLIPVisionConfig}

    def __init__(self, **fields: Any) -> None:
        fields.pop("text_config", None)  # where a file was written from this class: the same fields once more
        self.frequencies_by, rotary = _rotary(fields)
        text = {name: value for name, value in fields.items() if name not in _OWN}
        self.text_config = Phi3Config(**{**text, **rotary})
        self.text_config.architectures = ["Phi3ForCausalLM"]
        self.vision_config = CLIPVisionConfig(**{**_TOWER, **(fields.pop("vision_config", None) or {})})
        self.img_processor = fields.pop("img_processor", None)
        self.embd_layer = fields.pop("embd_layer", None)
        self.image_token_id = fields.pop("image_token_id", 32044)
        general = ("architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings",
                   "torch_dtype", "dtype", "transformers_version", "name_or_path", "_commit_hash")  # fmt: skip
        super().__init__(**{name: fields[name] for name in general if name in fields})
        for name, value in vars(self.text_config).items():
            if not name.startswith("_") and name not in vars(self):
                setattr(self, name, value)
        told = self.img_processor if isinstance(self.img_processor, Mapping) else {}
        self.vision_feature_layer = told.get("layer_idx", -2)
        self.vision_feature_select_strategy = "default"


def _rotary(fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The type of rotation as the file calls it, and the field that says so in transformers' words of today."""
    for name in ("rope_parameters", "rope_scaling"):
        told = fields.get(name)
        if isinstance(told, Mapping):
            kind = told.get("rope_type", told.get("type"))
            rest = {key: value for key, value in told.items() if key not in ("type", "rope_type")}
            return kind, {name: {**rest, "rope_type": "longrope" if kind == "su" else kind}}
    return None, {}


class Phi3VForCausalLM(VisionLanguageModel):
    crosses_threshold: ClassVar = False  # as Phi-3: the published code computes the whole context anew there
    numbered_marker = "<|image_{}|>"
    own_renames: ClassVar = (
        (r"model\.(vision_embed_tokens\.img_processor\.)(?:vision_model\.)?(.+)", r"\1\2"),
        (r"model\.vision_embed_tokens\.wte\.(.+)", r"language_model.model.embed_tokens.\1"),
        (r"model\.(vision_embed_tokens\..+)", r"\1"),
        (r"model\.((?:embed_tokens|layers|norm)\..+)", r"language_model.model.\1"),
    )
    # A CLIP tower has no `vision_model` in it since transformers 5.
    published_parts: ClassVar = {
        "vision_embed_tokens.img_processor": (
            "model.vision_embed_tokens.img_processor.vision_model", "model.vision_embed_tokens.img_processor",
        ),
        "vision_embed_tokens": ("model.vision_embed_tokens",) * 2,
        "language_model.{base}": ("model",) * 2,
        "language_model.lm_head": ("lm_head",) * 2,
    }  # fmt: skip

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.vision_embed_tokens = ImageEmbedding(config)
        self.side: int = config.vision_config.image_size
        self.processor_settings = {"crop_size": self.side}
        text = text_model(config)
        self.adopt(text)
        text.get_submodule("model.embed_tokens").unadapted = _TWO_TABLES  # type: ignore[assignment]

    @classmethod
    def check_config(cls, config: PretrainedConfig) -> None:
        super().check_config(config)
        if config.frequencies_by not in (None, "default", "su", "longrope"):
            refuse(config, "rope_scaling", "its type must be su or longrope", config.frequencies_by)
        _check_told(config, "embd_layer", _EMBD_LAYER)
        _check_told(config, "img_processor", _IMG_PROCESSOR)
        _check_tower(config)

    def see_files(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """The published code has two names for the table of embeddings, and files either of them or both."""
        names = set(checkpoint.names())
        if not names.issuperset((_TABLE, _SAME_TABLE)):
            return {}
        if not torch.equal(checkpoint.tensor(_TABLE), checkpoint.tensor(_SAME_TABLE)):
            raise CheckpointError(
                f"{checkpoint.directory}: {_TABLE} and {_SAME_TABLE} are one table in the model, and the files' differ."
            )
        self.checkpoint_ignored = (*self.checkpoint_ignored, re.escape(_SAME_TABLE))
        return {_SAME_TABLE: _SAME_TABLE}

    def check_processor(self, settings: Mapping[str, Any]) -> None:
        told, own = settings.get("num_img_tokens"), (self.vision_embed_tokens.tower.grid // 2) ** 2
        if told not in (None, own):
            raise CheckpointError(
                f"the image processor's num_img_tokens={told}, and config.json makes {own} features of a crop."
            )

    def image_layout(self, inputs: ImageInputs) -> ImageLayout:
        shape, (rows, columns) = tuple(inputs["pixel_values"].shape[1:]), self._crops(inputs)
        if shape != (1 + rows * columns, 3, self.side, self.side):
            raise ValueError(
                f"the image processor makes {list(shape)} of it in {rows} x {columns} crops, and the tower takes "
                f"[3, {self.side}, {self.side}] of each and of the whole"
            )
        return self._layout(rows, columns)

    def planned_layout(self, size: tuple[int, int], final: tuple[int, int]) -> ImageLayout | None:
        if any(edge % self.side for edge in final):
            raise ValueError(f"the image processor makes {list(final)} of it, and the tower takes crops of {self.side}")
        return self._layout(*(edge // self.side for edge in final))

    def encode(self, inputs: ImageInputs) -> torch.Tensor:
        return self.vision_embed_tokens(inputs["pixel_values"][0], *self._crops(inputs))

    def _crops(self, inputs: ImageInputs) -> tuple[int, int]:
        """Rows and columns of the image's crops."""
        height, width = inputs["image_sizes"][0].tolist()
        return height // self.side, width // self.side

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        squares = self.vision_embed_tokens.squares
        picture = rows * squares * (columns * squares + 1)  # each row of features has its separator
        return ImageLayout(picture + 1 + squares * (squares + 1))


class ImageEmbedding(nn.Module):
    """An image's pixels to its features, under the names that the published code has for its parts."""

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers import AutoModel

        super().__init__()
        built = build_tower(lambda: AutoModel.from_config(config.vision_config))
        self.img_processor: nn.Module = getattr(built, "vision_model", built)
        self.tower = FixedGridTower(config, self.img_processor)
        self.squares = self.tower.grid // 2  # a side, of a crop
        self.whole_first = config.embd_layer.get("hd_transform_order", "glb_sub") == "glb_sub"
        channels, hidden = 4 * self.tower.channels, config.text_config.hidden_size
        self.glb_GN = nn.Parameter(torch.empty(1, 1, channels), requires_grad=False)
        self.sub_GN = nn.Parameter(torch.empty(1, 1, 1, channels), requires_grad=False)
        # An activation stands between the two, and has a number too.
        self.img_projection = nn.ModuleDict({"0": Linear(channels, hidden), "2": Linear(hidden, hidden)})
        self.activate = activation("gelu")

    def forward(self, pixels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """pixels: [1 + rows * columns, 3, side, side], the image as a whole first -> [features, E]."""
        patches = self.tower(pixels.to(self.glb_GN.dtype))  # [crops, grid * grid, C]
        side, channels = self.squares, patches.shape[-1]
        squares = patches.view(-1, side, 2, side, 2, channels).transpose(2, 3).reshape(-1, side, side, 4 * channels)
        crops = squares[1:].view(rows, columns, side, side, -1).transpose(1, 2)
        picture = self._lines(crops.reshape(rows * side, columns * side, -1))
        whole = self._lines(squares[0])
        first, last = (whole, picture) if self.whole_first else (picture, whole)
        features = torch.cat((first, self.glb_GN[0], last))
        projected: torch.Tensor = self.img_projection["2"](self.activate(self.img_projection["0"](features)))
        return projected

    def _lines(self, picture: torch.Tensor) -> torch.Tensor:
        """[rows, columns, C] -> the rows one behind the other, each with its separator."""
        return torch.cat((picture, self.sub_GN[0].expand(len(picture), 1, -1)), dim=1).flatten(0, 1)


def _check_told(config: PretrainedConfig, field: str, known: Mapping[str, tuple[Any, ...] | None]) -> None:
    """Refuse an object of config.json that says what is not served, or nothing."""
    told = getattr(config, field)
    if not isinstance(told, Mapping):
        refuse(config, field, "it must be an object that describes how images are embedded")
    for name in told.keys() - known.keys():
        refuse(config, f"{field}.{name}", "no published checkpoint has this field", told[name])
    for name, served in known.items():
        if served is not None and told.get(name) not in served:
            values = " or ".join(repr(one) for one in served if one is not None)
            refuse(config, f"{field}.{name}", f"served only with {values}", told.get(name))


def _check_tower(config: PretrainedConfig) -> None:
    vision, told = config.vision_config, config.img_processor
    check_grid(config)
    grid, states = vision.image_size // vision.patch_size, vision.num_hidden_layers + 1
    if grid < 2 or grid % 2:
        reason = f"squares of 2 x 2 patches are one feature, and a crop has {grid} a side"
        refuse(config, "vision_config.patch_size", reason, vision.patch_size)
    layer = told.get("layer_idx", -2)
    if type(layer) is not int or not -states <= layer < states:
        refuse(config, "img_processor.layer_idx", f"it must be one of the tower's {states} hidden states", layer)
    for field, value in (("image_dim_out", vision.hidden_size), ("num_img_tokens", (grid // 2) ** 2)):
        if told.get(field, value) != value:
            refuse(config, f"img_processor.{field}", f"the tower makes {value}", told[field])
