"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: (tower, text, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.multimodal.families.family import IMAGE, LLAMA, VOCAB, Family

_QWEN2_VISION = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "mlp_ratio": 2,
}  # fmt: skip
# Windows of 3 x 3 tokens, which do not divide most grids; three heads; one layer that sees all.
_QWEN25_VISION = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 36, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 24, "fullatt_block_indexes": [1], "out_hidden_size": 32,
    "tokens_per_second": 2,
}  # fmt: skip
_QWEN3_VISION = {
    "depth": 4, "hidden_size": 24, "intermediate_size": 36, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2], "out_hidden_size": 32,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
_TEXT = {**LLAMA, "rope_parameters": _ROPE}
_TURNS = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_TEXT3 = {**LLAMA, "num_hidden_layers": 3, "head_dim": 8, "rope_parameters": _TURNS}
_TEXT3_MOE = {
    **_TEXT3, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
_SIZE = {"shortest_edge": 64, "longest_edge": 2048}
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 4,
}  # fmt: skip

_QWEN2: dict[str, Any] = {
    "mrope": (_QWEN2_VISION, _TEXT, {}, {}),
    "yarn": (_QWEN2_VISION, {**_TEXT, "rope_parameters": _YARN}, {}, {}),
    "tied": (
        {**_QWEN2_VISION, "hidden_act": "gelu", "depth": 1},
        {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        {"tie_word_embeddings": True},
        {},
    ),
    "merge_of_three": (
        {**_QWEN2_VISION, "spatial_merge_size": 3, "patch_size": 2, "num_heads": 8},
        {**_TEXT, "num_key_value_heads": 1},
        {},
        {"merge_size": 3, "patch_size": 2, "size": {"shortest_edge": 36, "longest_edge": 1200}},
    ),
    "one_frame": (
        {**_QWEN2_VISION, "temporal_patch_size": 1, "mlp_ratio": 1, "num_heads": 2},
        {**_TEXT, "rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 2.0}},
        {},
        {"temporal_patch_size": 1},
    ),
}
_QWEN25: dict[str, Any] = {
    "windows": (_QWEN25_VISION, _TEXT, {}, {}),
    "tied": (
        {**_QWEN25_VISION, "num_heads": 2, "hidden_act": "gelu", "window_size": 16, "fullatt_block_indexes": [0, 2]},
        {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}, "num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {},
    ),
    "yarn": (_QWEN25_VISION, {**_TEXT, "rope_parameters": _YARN}, {}, {}),
    "merge_of_three": (
        {**_QWEN25_VISION, "spatial_merge_size": 3, "patch_size": 2, "window_size": 12, "num_heads": 6},
        _TEXT,
        {},
        {"merge_size": 3, "patch_size": 2, "size": {"shortest_edge": 36, "longest_edge": 1200}},
    ),
    "all_windows": (
        {**_QWEN25_VISION, "fullatt_block_indexes": [], "depth": 2},
        {**_TEXT, "rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 2.0}},
        {},
        {},
    ),
    "no_windows": (
        {**_QWEN25_VISION, "fullatt_block_indexes": [0, 1, 2], "temporal_patch_size": 1},
        {**_TEXT, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        {},
        {"temporal_patch_size": 1},
    ),
}
_QWEN3: dict[str, Any] = {
    "deepstack": (_QWEN3_VISION, _TEXT3, {}, {}),
    "tied": (
        {**_QWEN3_VISION, "deepstack_visual_indexes": [1, 2, 3], "num_position_embeddings": 9, "hidden_act": "silu"},
        {**_TEXT3, "head_dim": 12, "attention_bias": True, "rope_parameters": {**_TURNS, "mrope_section": [2, 2, 2]}},
        {"tie_word_embeddings": True},
        {},
    ),
    "no_levels": ({**_QWEN3_VISION, "deepstack_visual_indexes": [], "depth": 1}, _TEXT3, {}, {}),
    "yarn": (
        _QWEN3_VISION,
        {**_TEXT3, "rope_parameters": {**_YARN, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {},
        {},
    ),
    "merge_of_three": (
        {**_QWEN3_VISION, "spatial_merge_size": 3, "patch_size": 2, "num_heads": 6, "deepstack_visual_indexes": [3]},
        {**_TEXT3, "rope_parameters": {**_TURNS, "rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 1},
        {},
        {"merge_size": 3, "patch_size": 2, "size": {"shortest_edge": 36, "longest_edge": 1200}},
    ),
    "not_said": (  # that positions are by turns
        {**_QWEN3_VISION, "temporal_patch_size": 1, "in_channels": 3},
        {**_TEXT3, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        {},
        {"temporal_patch_size": 1},
    ),
}
_QWEN3_MOE: dict[str, Any] = {
    "experts": (_QWEN3_VISION, _TEXT3_MOE, {}, {}),
    "some_layers": (
        {**_QWEN3_VISION, "deepstack_visual_indexes": [1]},
        {**_TEXT3_MOE, "mlp_only_layers": [1], "attention_bias": True, "num_experts_per_tok": 3},
        {},
        {},
    ),
    "by_step": (_QWEN3_VISION, {**_TEXT3_MOE, "decoder_sparse_step": 2, "head_dim": 8}, {}, {}),
    "tied": (_QWEN3_VISION, {**_TEXT3_MOE, "tie_word_embeddings": True}, {"tie_word_embeddings": True}, {}),
    "one_of_four": (_QWEN3_VISION, {**_TEXT3_MOE, "num_experts": 4, "num_experts_per_tok": 1}, {}, {}),
}
WORDS = {
    IMAGE: "<|image_pad|>", VOCAB - 2: "<|video_pad|>", VOCAB - 3: "<|vision_start|>", VOCAB - 4: "<|vision_end|>",
    VOCAB - 5: "<|im_start|>", VOCAB - 6: "<|im_end|>",
}  # fmt: skip


def _config(kind: str, variant: Any) -> Any:
    tower, text, settings, _ = variant
    return getattr(transformers, kind)(vision_config=tower, text_config=text, **_TOKENS, **settings)


def _processor(variant: Any) -> Any:
    return Qwen2VLImageProcessorPil(
        **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": _SIZE, **variant[3]}
    )


FAMILIES = {
    "Qwen2VLForConditionalGeneration": Family(
        _QWEN2,
        lambda variant: _config("Qwen2VLConfig", variant),
        _processor,
        quick=("mrope", "yarn", "tied"),
        mrope=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        _QWEN25,
        lambda variant: _config("Qwen2_5_VLConfig", variant),
        _processor,
        quick=("windows", "tied"),
        mrope=True,
        words=WORDS,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        _QWEN3,
        lambda variant: _config("Qwen3VLConfig", variant),
        _processor,
        quick=("deepstack", "tied"),
        mrope=True,
        words=WORDS,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        _QWEN3_MOE,
        lambda variant: _config("Qwen3VLMoeConfig", variant),
        _processor,
        quick=("experts",),
        mrope=True,
        words=WORDS,
    ),
}
