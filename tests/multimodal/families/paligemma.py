"""PaliGemma and PaliGemma 2: (tower, text model, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, VOCAB, Family

PLACES = {VOCAB - 2: "<loc0000>", VOCAB - 3: "<loc1023>", VOCAB - 4: "<seg127>"}
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 3, "image_size": SIDE, "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
_GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 8, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = {
    **LLAMA, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip

_VARIANTS: dict[str, Any] = {
    "gemma": (_VISION, _GEMMA, {}, {}),
    "gemma2": (_VISION, _GEMMA2, {}, {}),
    "untied": (
        {**_VISION, "num_attention_heads": 4, "patch_size": 6, "hidden_act": "gelu"},
        {**_GEMMA, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": False},
        {"tie_word_embeddings": False},
        {},
    ),
    "patches_left_over": (
        {**_VISION, "image_size": 20, "patch_size": 6, "vision_use_head": True},
        {**_GEMMA2, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "num_key_value_heads": 4},
        {},
        {"size": {"height": 20, "width": 20}},
    ),
    "small": (
        {**_VISION, "image_size": 16, "num_hidden_layers": 1},
        {**_GEMMA2, "layer_types": ["full_attention", "sliding_attention"], "head_dim": 16},
        {},
        {"size": {"height": 16, "width": 16}},
    ),
    "linear_rope": (
        {**_VISION, "num_attention_heads": 6},
        {**_GEMMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}},
        {},
        {},
    ),
}


def _config(variant: Any) -> Any:
    tower, text, settings, _ = variant
    return transformers.PaliGemmaConfig(
        vision_config=tower, text_config=text, image_token_index=IMAGE, projection_dim=32, hidden_size=32, **settings
    )


def _processor(variant: Any) -> Any:
    made = SiglipImageProcessorPil(**{"size": {"height": SIDE, "width": SIDE}, **variant[3]})
    made.image_seq_length = (variant[0]["image_size"] // variant[0]["patch_size"]) ** 2
    return made


def _ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    """Without BOS and the end of the line, which a text has beside a prompt's ids."""
    return [IMAGE] * (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def _types(ids: list[int]) -> dict[str, torch.Tensor]:
    """All of a prompt is its prefix."""
    return {"token_type_ids": torch.zeros(1, len(ids), dtype=torch.int64)}


FAMILIES = {
    "PaliGemmaForConditionalGeneration": Family(
        _VARIANTS,
        _config,
        _processor,
        quick=("gemma", "gemma2"),
        words={IMAGE: "<image>", **PLACES},
        ids=_ids,
        # A step has all of a prompt, and with windows a quarter of the pool at most.
        blocks={
            "gemma": 45,
            "gemma2": 84,
            "untied": 70,
            "patches_left_over": 45,
            "small": 74,
            "linear_rope": 45,
        },
        types=_types,
        whole=True,
    )
}
