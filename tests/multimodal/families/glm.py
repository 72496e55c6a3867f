"""GLM-4.1V and GLM-4.5V: (tower, text model, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.multimodal.families.family import IMAGE, LLAMA, VOCAB, Family

_VISION = {
    "depth": 2, "hidden_size": 24, "intermediate_size": 36, "num_heads": 3, "image_size": 20, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "hidden_act": "silu",
}  # fmt: skip
# Half of each head turns.
_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}
_TEXT = {**LLAMA, "rope_parameters": _ROPE, "pad_token_id": 0}
_WHOLE = {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
_MOE = {
    **_TEXT, "head_dim": 12, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1]}, "num_hidden_layers": 3,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "attention_bias": True,
}  # fmt: skip
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VOCAB - 2, "image_start_token_id": VOCAB - 3,
    "image_end_token_id": VOCAB - 4, "video_start_token_id": VOCAB - 5, "video_end_token_id": VOCAB - 6,
}  # fmt: skip
_SIZE = {"shortest_edge": 128, "longest_edge": 4096}  # of both frames of a patch

_GLM4V: dict[str, Any] = {
    "half": (_VISION, _TEXT, {}, {}),
    "tied": (
        {**_VISION, "num_heads": 2, "attention_bias": True, "hidden_act": "gelu", "image_size": 12},
        {**_TEXT, "rope_parameters": _WHOLE, "num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {},
    ),
    "yarn": (
        {**_VISION, "depth": 1},
        {**_TEXT, "rope_parameters": {**_WHOLE, "rope_type": "yarn", "factor": 2.0,
                                      "original_max_position_embeddings": 512}},
        {},
        {},
    ),
    "merge_of_three": (
        {**_VISION, "spatial_merge_size": 3, "patch_size": 2, "num_heads": 6, "image_size": 13},
        _TEXT,
        {},
        {"merge_size": 3, "patch_size": 2, "size": {"shortest_edge": 72, "longest_edge": 2400}},
    ),
    "one_frame": (
        {**_VISION, "temporal_patch_size": 1, "rms_norm_eps": 1e-3},
        {**_TEXT, "rope_parameters": {**_WHOLE, "rope_type": "linear", "factor": 2.0}},
        {},
        {"temporal_patch_size": 1, "size": {"shortest_edge": 64, "longest_edge": 2048}},
    ),
}  # fmt: skip
_GLM4V_MOE: dict[str, Any] = {
    "experts": (_VISION, _MOE, {}, {}),
    "tied": (_VISION, {**_MOE, "tie_word_embeddings": True}, {"tie_word_embeddings": True}, {}),
    "no_bias": (_VISION, {**_MOE, "attention_bias": False, "n_group": 1, "n_shared_experts": 2}, {}, {}),
    "dense_first": (_VISION, {**_MOE, "first_k_dense_replace": 2, "norm_topk_prob": False}, {}, {}),
    "whole": (
        {**_VISION, "attention_bias": True},
        {**_MOE, "head_dim": 8, "rope_parameters": _WHOLE, "num_experts_per_tok": 3},
        {},
        {},
    ),
}
_WORDS = {
    IMAGE: "<|image|>", VOCAB - 2: "<|video|>", VOCAB - 3: "<|begin_of_image|>", VOCAB - 4: "<|end_of_image|>",
    VOCAB - 5: "<|begin_of_video|>", VOCAB - 6: "<|end_of_video|>", VOCAB - 7: "<|user|>", VOCAB - 8: "<|assistant|>",
}  # fmt: skip


def _config(kind: str, variant: Any) -> Any:
    tower, text, settings, _ = variant
    return getattr(transformers, kind)(vision_config=tower, text_config=text, **_TOKENS, **settings)


def _processor(variant: Any) -> Any:
    return Glm4vImageProcessorPil(
        **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": _SIZE, **variant[3]}
    )


FAMILIES = {
    "Glm4vForConditionalGeneration": Family(
        _GLM4V,
        lambda variant: _config("Glm4vConfig", variant),
        _processor,
        quick=("half", "tied"),
        mrope=True,
        gains={"half": 1.5},  # more, and float32 has no fourth decimal
        words=_WORDS,
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        _GLM4V_MOE,
        lambda variant: _config("Glm4vMoeConfig", variant),
        _processor,
        quick=("experts",),
        mrope=True,
        words=_WORDS,
    ),
}
