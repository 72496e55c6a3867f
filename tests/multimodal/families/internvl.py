"""InternVL: (tower, text model, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, VOCAB, Family

_VISION = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": SIDE,
    "patch_size": 6, "attention_bias": True,
}  # fmt: skip
_TEXT = {"model_type": "qwen2", **LLAMA}

_VARIANTS: dict[str, Any] = {
    "tiles": (_VISION, _TEXT, {"tie_word_embeddings": False}, {}),
    "norms": (
        {**_VISION, "use_qk_norm": True, "norm_type": "rms_norm", "num_attention_heads": 4, "attention_bias": False},
        {**_TEXT, "model_type": "llama", "tie_word_embeddings": True},
        {"vision_feature_layer": -2, "tie_word_embeddings": True},
        {"max_patches": 4, "min_patches": 2},
    ),
    "last_norm": (
        {**_VISION, "use_mean_pooling": False, "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 2},
        {**_TEXT, "model_type": "qwen3", "head_dim": 12},
        {"projector_hidden_act": "silu"},
        {"max_patches": 1},
    ),
    "groups_of_four": (
        {**_VISION, "use_absolute_position_embeddings": False, "image_size": [32, 32], "patch_size": [4, 4]},
        {**_TEXT, "num_key_value_heads": 1},
        {"downsample_ratio": 0.25, "vision_feature_layer": 1},
        {"size": {"height": 32, "width": 32}, "max_patches": 6},
    ),
    "no_groups": (
        {**_VISION, "num_attention_heads": 6, "patch_size": 12, "use_mask_token": True},
        {**_TEXT, "sliding_window": 30, "use_sliding_window": True, "max_window_layers": 1},
        {"downsample_ratio": 1.0, "vision_feature_layer": 3},
        {},
    ),
}


def _config(variant: Any) -> Any:
    tower, text, settings, _ = variant
    vision = {"model_type": "internvl_vision", **tower}
    return transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, **settings)


def _processor(variant: Any) -> Any:
    """As its processor calls it: with tiles."""
    settings = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 3, **variant[3]}
    return GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)


def _ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    vision = config.vision_config
    length = int((vision.image_size[0] // vision.patch_size[0] * config.downsample_ratio) ** 2)
    names = {"image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
    text = InternVLProcessor.replace_image_token(SimpleNamespace(image_seq_length=length, **names), inputs, 0)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _features(found: Any) -> torch.Tensor:
    return found.flatten(0, 1)


FAMILIES = {
    "InternVLForConditionalGeneration": Family(
        _VARIANTS,
        _config,
        _processor,
        quick=("tiles", "norms"),
        words={IMAGE: "<IMG_CONTEXT>", VOCAB - 2: "<img>", VOCAB - 3: "</img>"},
        ids=_ids,
        features=_features,
        unused=("num_patches",),
    )
}
