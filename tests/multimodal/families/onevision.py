"""LLaVA-OneVision and LLaVA-NeXT-Video: (tower, text model, settings of the whole) of each variant."""

from __future__ import annotations

from typing import Any

from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from tests.multimodal.families.family import LLAMA, SIDE, VOCAB, Family
from tests.multimodal.families.llava import CLIP, GRIDS, QWEN2, SIGLIP, config

_TEXT = ("LlamaConfig", LLAMA)
_ODD = ("SiglipVisionConfig", {**SIGLIP[1], "hidden_size": 24, "num_attention_heads": 3, "vision_use_head": False})
_VIDEO = {"video_token_index": VOCAB - 2}
_ONEVISION: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "scaled": (_ODD, _TEXT, {**GRIDS, **_VIDEO, "vision_aspect_ratio": "anyres_max_2"}),
    "published": (SIGLIP, QWEN2, {**GRIDS, **_VIDEO, "tie_word_embeddings": True}),
    "one_tile": (SIGLIP, _TEXT, {**GRIDS, **_VIDEO, "vision_aspect_ratio": "anyres_max_1"}),
    "layers": (
        SIGLIP,
        _TEXT,
        {**GRIDS, **_VIDEO, "vision_feature_layer": [-2, 1], "vision_aspect_ratio": "anyres_max_3"},
    ),
    "clip": (
        CLIP, _TEXT, {**GRIDS, **_VIDEO, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
                      "multimodal_projector_bias": False, "vision_aspect_ratio": "anyres_max_3"},
    ),
}  # fmt: skip
_NEXT_VIDEO: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "average": (CLIP, _TEXT, {**GRIDS, **_VIDEO}),
    "max": (CLIP, QWEN2, {**GRIDS, **_VIDEO, "spatial_pool_mode": "max", "spatial_pool_stride": 3}),
    "conv": (CLIP, _TEXT, {**GRIDS, **_VIDEO, "spatial_pool_mode": "conv", "vision_feature_layer": -1}),
    "even": (("CLIPVisionConfig", {**CLIP[1], "patch_size": 6}), _TEXT, {**GRIDS, **_VIDEO}),
    "siglip": (_ODD, _TEXT, {**GRIDS, **_VIDEO, "vision_feature_select_strategy": "full"}),
    "layers": (CLIP, _TEXT, {**GRIDS, **_VIDEO, "vision_feature_layer": [1, -1], "projector_hidden_act": "silu"}),
}


def _onevision(variant: Any) -> Any:
    return LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, **GRIDS)


def _next_video(variant: Any) -> Any:
    return LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, **GRIDS)


FAMILIES = {
    "LlavaOnevisionForConditionalGeneration": Family(
        _ONEVISION, lambda variant: config("LlavaOnevisionConfig", variant), _onevision, quick=("scaled",)
    ),
    "LlavaNextVideoForConditionalGeneration": Family(
        _NEXT_VIDEO, lambda variant: config("LlavaNextVideoConfig", variant), _next_video, quick=("average",)
    ),
}
