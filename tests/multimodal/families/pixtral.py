"""Mistral 3, and LLaVA with Pixtral's tower: (tower, text model, settings of the whole, of the image processor)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tests.multimodal.families.family import IMAGE, LLAMA, VOCAB, Family

# Its processor's file imports torchvision for something else.
_WITHOUT = ModuleType("transformers.models.pixtral.image_processing_pixtral")
_WITHOUT.get_resize_output_image_size = None  # type: ignore[attr-defined]
with patch.dict(sys.modules, {_WITHOUT.__name__: _WITHOUT}):
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

_VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 48,
    "patch_size": 4, "hidden_act": "silu",
}  # fmt: skip
_TEXT = {"model_type": "mistral", **LLAMA, "head_dim": 12, "sliding_window": None}

_MISTRAL3: dict[str, Any] = {
    "merged": (_VISION, _TEXT, {"tie_word_embeddings": False}, {}),
    "window_tied": (
        {**_VISION, "hidden_act": "gelu", "num_attention_heads": 2, "patch_size": 5},
        {**_TEXT, "sliding_window": 48, "tie_word_embeddings": True},
        {"vision_feature_layer": -2, "multimodal_projector_bias": True, "tie_word_embeddings": True},
        {"size": {"longest_edge": 70}},
    ),
    "ministral": (
        {**_VISION, "hidden_act": "gelu"},
        {
            **_TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 12,
                "llama_4_scaling_beta": 0.4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {"tie_word_embeddings": False},
        {},
    ),
    "merge_of_three": (
        {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 6, "patch_size": 3},
        _TEXT,
        {"spatial_merge_size": 3, "vision_feature_layer": [1], "projector_hidden_act": "gelu_pytorch_tanh"},
        {},
    ),
    "one_patch": (
        _VISION,
        _TEXT,
        {"spatial_merge_size": 1, "vision_feature_layer": -3},
        {"size": {"longest_edge": 24}},
    ),
    "not_scaled": (
        {**_VISION, "rope_parameters": {"rope_type": "axial", "rope_theta": 300.0}},
        {**_TEXT, "model_type": "llama", "num_key_value_heads": 1},
        {"vision_feature_layer": 2},
        {"do_resize": False},
    ),
}
_FULL = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
_LLAVA: dict[str, Any] = {
    "pixtral": (_VISION, _TEXT, _FULL, {"size": {"longest_edge": 24}}),
    "pixtral_layers": (
        {**_VISION, "hidden_act": "gelu", "patch_size": 6},
        {**_TEXT, "model_type": "qwen2"},
        {**_FULL, "vision_feature_layer": [1, -1], "multimodal_projector_bias": False},
        {"size": {"longest_edge": 40}},
    ),
}  # fmt: skip
_WORDS = {IMAGE: "[IMG]", VOCAB - 2: "[IMG_BREAK]", VOCAB - 3: "[IMG_END]"}


def _config(kind: str, variant: Any) -> Any:
    tower, text, settings, _ = variant
    return getattr(transformers, kind)(
        vision_config={"model_type": "pixtral", **tower}, text_config=text, image_token_index=IMAGE, **settings
    )


def _processor(variant: Any) -> Any:
    """As its processor calls it: with the side of a merged patch."""
    merge = 1 if "vision_feature_select_strategy" in variant[2] else variant[2].get("spatial_merge_size", 2)
    unit = variant[0]["patch_size"] * merge
    settings = {"size": {"longest_edge": 48}, "patch_size": {"height": unit, "width": unit}, **variant[3]}
    return PixtralImageProcessorPil(**settings)


def _ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    names = dict(zip(("image_token", "image_break_token", "image_end_token"), _WORDS.values(), strict=True))
    merge = getattr(config, "spatial_merge_size", 1)
    own = SimpleNamespace(patch_size=config.vision_config.patch_size, spatial_merge_size=merge, **names)
    text = PixtralProcessor.replace_image_token(own, inputs, 0)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _features(found: Any) -> torch.Tensor:
    return torch.cat(list(found))


FAMILIES = {
    "Mistral3ForConditionalGeneration": Family(
        _MISTRAL3,
        lambda variant: _config("Mistral3Config", variant),
        _processor,
        quick=("merged", "window_tied"),
        blocks={"window_tied": 80},
        words=_WORDS,
        ids=_ids,
        features=_features,
    ),
    "LlavaOfPixtral": Family(
        _LLAVA,
        lambda variant: _config("LlavaConfig", variant),
        _processor,
        quick=("pixtral",),
        words=_WORDS,
        ids=_ids,
        features=_features,
        architecture="LlavaForConditionalGeneration",
    ),
}
