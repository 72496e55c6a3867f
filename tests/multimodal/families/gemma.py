"""Gemma 3: (tower, text model, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, VOCAB, Family

SOFT, END = VOCAB - 2, VOCAB - 3
WORDS = {IMAGE: "<start_of_image>", SOFT: "<image_soft_token>", END: "<end_of_image>"}
LINES = {VOCAB - 3 - count: "\n" * count for count in (2, 3, 4)}  # in which newlines run together, as in Gemma's
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 3, "image_size": SIDE, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_TEXT = {
    **LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

_VARIANTS: dict[str, Any] = {
    "windows": (_VISION, _TEXT, {"mm_tokens_per_image": 9}, {}),
    "untied": (
        {**_VISION, "num_attention_heads": 4, "patch_size": 6, "hidden_act": "gelu"},
        {**_TEXT, "tie_word_embeddings": False, "num_key_value_heads": 1, "sliding_window": 10},
        {"mm_tokens_per_image": 4, "tie_word_embeddings": False},
        {},
    ),
    "all_see_all": (
        {**_VISION, "vision_use_head": True, "num_hidden_layers": 1},
        {**_TEXT, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 20.0},
        {"mm_tokens_per_image": 4},
        {},
    ),
    "patches_left_over": (
        {**_VISION, "image_size": 20, "patch_size": 4},
        {**_TEXT, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        {"mm_tokens_per_image": 4},
        {"size": {"height": 20, "width": 20}},
    ),
    "linear_rope": (
        {**_VISION, "num_attention_heads": 6},
        {
            **_TEXT,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"mm_tokens_per_image": 9},
        {},
    ),
}


def _config(variant: Any) -> Any:
    tower, text, settings, _ = variant
    marks = {"boi_token_index": IMAGE, "image_token_index": SOFT, "eoi_token_index": END}
    return transformers.Gemma3Config(vision_config=tower, text_config=text, **marks, **settings)


def _processor(variant: Any) -> Any:
    """As its processor calls it: without crops."""
    return Gemma3ImageProcessorPil(**{"size": {"height": SIDE, "width": SIDE}, **variant[3]}, do_pan_and_scan=False)


def _ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    """Without the newlines around it, which a text has beside a prompt's ids."""
    soft = "<image_soft_token>" * config.mm_tokens_per_image
    own = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{soft}<end_of_image>\n\n")
    text = Gemma3Processor.replace_image_token(own, inputs, 0).strip("\n")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _types(ids: list[int]) -> dict[str, torch.Tensor]:
    return {"token_type_ids": torch.tensor([[int(token == SOFT) for token in ids]])}


FAMILIES = {
    "Gemma3ForConditionalGeneration": Family(
        _VARIANTS,
        _config,
        _processor,
        quick=("windows", "untied"),
        words={**WORDS, **LINES},
        ids=_ids,
        unused=("num_crops",),
        blocks={"windows": 70, "untied": 56, "patches_left_over": 56, "linear_rope": 70},
        types=_types,
    )
}
