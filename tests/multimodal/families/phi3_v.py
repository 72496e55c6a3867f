"""Phi-3-vision: transformers has no class, so the reference is written here, of torch, CLIP and Phi-3.

Settings of a variant: the text model's, the tower's, `img_processor`'s and `embd_layer`'s of config.json, and the image
processor's. Files are written as the published checkpoints have them: names, configuration, and code that nobody runs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, Family

NAME = "Phi3VForCausalLM"
TOWER = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": SIDE,
    "patch_size": 6, "projection_dim": 24,
}  # fmt: skip
TEXT = {**LLAMA, "pad_token_id": 0, "original_max_position_embeddings": 1024, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_LONG = {
    "max_position_embeddings": 1536, "original_max_position_embeddings": 1400,
    "rope_scaling": {"type": "su", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.5, 6.0, 11.0]},
}  # fmt: skip

# (text model, tower, img_processor, embd_layer, image processor)
_VARIANTS: dict[str, Any] = {
    "published": ({**_LONG, "sliding_window": 262144}, {}, {}, {}, {"num_crops": 4}),
    "sixteen_crops": ({"num_key_value_heads": 4}, {"num_attention_heads": 2}, {}, {}, {"num_crops": 7}),
    "whole_first": (
        {"tie_word_embeddings": True}, {"patch_size": 12, "hidden_act": "gelu"}, {"layer_idx": -1},
        {"hd_transform_order": "glb_sub"}, {"num_crops": 3, "image_mean": [0.5, 0.4, 0.3]},
    ),
    "one_crop": ({"num_key_value_heads": 1, "rope_theta": 500.0}, {"layer_norm_eps": 1e-3}, {"layer_idx": 1}, {}, {}),
    # A patch is left over at the crops' edges.
    "edges": (
        {"hidden_act": "gelu"}, {"image_size": 30, "patch_size": 7}, {"layer_idx": 0},
        {"hd_transform_order": "sub_glb"}, {"num_crops": 5, "image_std": [0.2, 0.3, 0.5]},
    ),
    "window": ({"sliding_window": 40}, {"num_hidden_layers": 1}, {"layer_idx": -2}, {}, {"num_crops": 2}),
}  # fmt: skip


class Embedding(nn.Module):
    """Of images, by the names of the published files."""

    def __init__(self, tower: Any, told: Any, layer: Any, table: nn.Module, hidden: int) -> None:
        super().__init__()
        self.wte = table
        self.img_processor = nn.Module()
        self.img_processor.vision_model = transformers.CLIPVisionModel._from_config(tower, attn_implementation="eager")
        channels = 4 * tower.hidden_size
        self.glb_GN = nn.Parameter(torch.zeros(1, 1, channels))
        self.sub_GN = nn.Parameter(torch.zeros(1, 1, 1, channels))
        self.img_projection = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.layer, self.order = told.get("layer_idx", -2), layer["hd_transform_order"]
        self.side, self.grid = tower.image_size, tower.image_size // tower.patch_size

    def features(self, pixels: torch.Tensor, size: list[int]) -> torch.Tensor:
        """pixels: [1 + crops and more, 3, side, side] -> [features, E], put together patch by patch."""
        states = self.img_processor.vision_model(pixels, output_hidden_states=True).hidden_states[self.layer]
        patches = states[:, 1:].unflatten(1, (self.grid, self.grid))
        rows, columns = size[0] // self.side, size[1] // self.side
        down = [patches[1 + row * columns : 1 + (row + 1) * columns] for row in range(rows)]
        picture = torch.cat([torch.cat(list(line), dim=1) for line in down], dim=0)
        separator = self.glb_GN[0]
        parts = [self._read(picture), separator, self._read(patches[0])]
        return self.img_projection(torch.cat(parts if self.order == "sub_glb" else parts[::-1]))

    def _read(self, picture: torch.Tensor) -> torch.Tensor:
        """Square by square, line by line."""
        lines = []
        for row in range(0, picture.shape[0], 2):
            for column in range(0, picture.shape[1], 2):
                square = [picture[row + down, column + right] for down in (0, 1) for right in (0, 1)]
                lines.append(torch.cat(square))
            lines.append(self.sub_GN[0, 0, 0])
        return torch.stack(lines)


class Phi3VForCausalLM(transformers.Phi3ForCausalLM):
    """The published model; placeholders are image tokens, where the published code counts down from -1."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        tower = transformers.CLIPVisionConfig(**config.vision_config)
        self.model.vision_embed_tokens = Embedding(
            tower, config.img_processor, config.embd_layer, self.model.embed_tokens, config.hidden_size
        )
        self.post_init()

    def get_image_features(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> Any:
        embed = self.model.vision_embed_tokens.features
        found = [embed(*one) for one in zip(pixel_values, image_sizes.tolist(), strict=True)]
        return SimpleNamespace(pooler_output=found)

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, pixel_values: Any = None, image_sizes: Any = None,
        inputs_embeds: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        if pixel_values is not None:
            inputs_embeds = self.model.vision_embed_tokens.wte(input_ids)
            found = self.get_image_features(pixel_values, image_sizes).pooler_output
            inputs_embeds[input_ids == IMAGE] = torch.cat(found)
            input_ids = None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **more)

    def prepare_inputs_for_generation(self, input_ids: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        images = {name: kwargs.pop(name, None) for name in ("pixel_values", "image_sizes")}
        found = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        return {**found, **images} if found["input_ids"].shape[1] > 1 else found

    def save_pretrained(self, directory: Any, **more: Any) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        tensors = {name: one.contiguous() for name, one in self.state_dict().items() if ".wte." not in name}
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, Path(directory) / "model.safetensors")
        (Path(directory) / "config.json").write_text(json.dumps(self.config.as_published))


class Config(transformers.Phi3Config):
    model_type = "phi3_v"


def _config(variant: Any) -> Any:
    text, tower, told, layer, _ = variant
    text, tower = {**TEXT, **text}, {**TOWER, **tower}
    written = {
        "architectures": [NAME],
        "auto_map": {"AutoConfig": "configuration_phi3_v.Phi3VConfig",
                     "AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM"},
        "embd_layer": {"embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
                       "use_hd_transform": True, "with_learnable_separator": True, **layer},
        "img_processor": {"image_dim_out": tower["hidden_size"], "model_name": "openai/clip-vit-large-patch14-336",
                          "name": "clip_vision_model",
                          "num_img_tokens": (tower["image_size"] // tower["patch_size"] // 2) ** 2, **told},
        "model_type": "phi3_v", "torch_dtype": "float32", "transformers_version": "4.38.1", "use_cache": True, **text,
        "image_token_id": IMAGE, "vision_config": tower,
    }  # fmt: skip
    scaling = {**text.get("rope_scaling", {})}
    if scaling:
        scaling["original_max_position_embeddings"] = written["original_max_position_embeddings"]
        scaling["rope_type"] = {"su": "longrope"}[scaling.pop("type")]
    config = Config(**{**text, "rope_scaling": scaling or None})
    for name in ("embd_layer", "img_processor", "vision_config"):
        setattr(config, name, written[name])
    config.as_published = written
    return config


class Processor:
    """The published image processor, whose crops are of 336 pixels: here of `side`."""

    def __init__(self, side: int, num_crops: int = 1, **more: Any) -> None:
        self.side, self.num_crops = side, num_crops
        self.image_mean = more.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
        self.image_std = more.get("image_std", [0.26862954, 0.26130258, 0.27577711])

    def __call__(self, images: Any, return_tensors: str = "pt") -> dict[str, Any]:
        pictures = [self.picture(one) for one in (images if isinstance(images, list) else [images])]
        return {
            "pixel_values": torch.stack([self._pixels(one) for one in pictures]),
            "image_sizes": torch.tensor([[one.height, one.width] for one in pictures]),
        }

    def picture(self, image: Image.Image) -> Image.Image:
        if image.width < image.height:
            return self.picture(image.transpose(Image.Transpose.TRANSPOSE)).transpose(Image.Transpose.TRANSPOSE)
        ratio, scale = image.width / image.height, 1
        while scale * math.ceil(scale / ratio) <= self.num_crops:
            scale += 1
        width = (scale - 1) * self.side
        height = int(width / ratio)
        scaled = image.resize((width, height), Image.Resampling.BILINEAR)
        lacking = math.ceil(height / self.side) * self.side - height
        return ImageOps.expand(scaled, (0, lacking // 2, 0, lacking - lacking // 2), fill=(255, 255, 255))

    def _pixels(self, picture: Image.Image) -> torch.Tensor:
        """The whole, the crops, and nothing up to as many as there may be."""
        shown = torch.from_numpy(np.asarray(picture, dtype=np.float32) / np.float32(255)).permute(2, 0, 1)
        shown = (shown - torch.tensor(self.image_mean)[:, None, None]) / torch.tensor(self.image_std)[:, None, None]
        whole = functional.interpolate(shown[None], size=(self.side, self.side), mode="bicubic")[0]
        rows = [row.split(self.side, dim=2) for row in shown.split(self.side, dim=1)]
        crops = [whole, *(crop for row in rows for crop in row)]
        return torch.stack(crops + [torch.zeros_like(whole)] * (1 + self.num_crops - len(crops)))

    def save_pretrained(self, directory: Any) -> None:
        code = {"AutoProcessor": "processing_phi3_v.Phi3VProcessor",
                "AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor"}  # fmt: skip
        written = {"auto_map": code, "num_crops": self.num_crops, "image_mean": self.image_mean,
                   "image_std": self.image_std, "image_processor_type": "Phi3VImageProcessor",
                   "processor_class": "Phi3VProcessor"}  # fmt: skip
        (Path(directory) / "preprocessor_config.json").write_text(json.dumps(written))


FAMILIES = {
    NAME: Family(
        _VARIANTS,
        _config,
        lambda variant: Processor({**TOWER, **variant[1]}["image_size"], **variant[4]),
        quick=("published", "whole_first"),
        words={IMAGE: "<|image|>"},
        reference=Phi3VForCausalLM,
        blocks={},
    ),
}
