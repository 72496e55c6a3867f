"""Idefics3 and SmolVLM: (tower, text model, settings of the whole, of the image processor) of each variant."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, VOCAB, Family

_VISION = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": SIDE,
    "patch_size": 6,
}  # fmt: skip
_TEXT = {"model_type": "llama", **LLAMA}
_SMOL = {"scale_factor": 2}
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"

_VARIANTS: dict[str, Any] = {
    "squares": (_VISION, _TEXT, _SMOL, {}),
    # A patch is left over at the tiles' edges, as in SmolVLM's 384 = 27 * 14 + 6.
    "squares_of_three": (
        {**_VISION, "image_size": 28, "patch_size": 3, "num_attention_heads": 4},
        {**_TEXT, "num_key_value_heads": 1},
        {"scale_factor": 3, "tie_word_embeddings": True},
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "one_patch": (
        {**_VISION, "num_hidden_layers": 1, "hidden_act": "gelu", "patch_size": 8},
        {**_TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
        {"scale_factor": 1, "tie_word_embeddings": True},
        {"size": {"longest_edge": 40}},
    ),
    "no_tiles": (_VISION, _TEXT, {"scale_factor": 4}, {"do_image_splitting": False}),
    "large_tiles": (
        {**_VISION, "image_size": 32, "patch_size": 4, "num_hidden_layers": 3},
        {**_TEXT, "model_type": "mistral", "sliding_window": 4000},
        {"scale_factor": 4},
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_resize": False},
    ),
}


def _config(kind: str, variant: Any) -> Any:
    tower, text, settings, _ = variant
    return getattr(transformers, kind)(vision_config=tower, text_config=text, image_token_id=IMAGE, **settings)


def _processor(kind: Any, variant: Any) -> Any:
    usual = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    return kind(**{**usual, **variant[3]}, return_row_col_info=True)


def _length(config: Any) -> int:
    """Features of a tile."""
    return (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2


def _idefics3_ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    processor = Idefics3Processor.__new__(Idefics3Processor)
    processor.fake_image_token, processor.image_token, processor.global_image_tag = _AROUND, "<image>", _WHOLE
    processor.image_seq_len = _length(config)
    return tokenizer(processor.replace_image_token(inputs, 0), add_special_tokens=False)["input_ids"]


def _smolvlm_ids(tokenizer: Any, config: Any, inputs: Any) -> list[int]:
    text = get_image_prompt_string(
        inputs["rows"][0][0], inputs["cols"][0][0], _length(config), _AROUND, "<image>", _WHOLE
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _features(found: Any) -> torch.Tensor:
    return torch.cat(list(found))


_WORDS = {IMAGE: "<image>", VOCAB - 2: _AROUND}
_PLACES = {VOCAB - 4 - 6 * row - column: f"<row_{row + 1}_col_{column + 1}>" for row in range(3) for column in range(6)}

FAMILIES = {
    "Idefics3ForConditionalGeneration": Family(
        _VARIANTS,
        lambda variant: _config("Idefics3Config", variant),
        lambda variant: _processor(Idefics3ImageProcessorPil, variant),
        quick=("squares_of_three",),
        words=_WORDS,
        ids=_idefics3_ids,
        features=_features,
        blocks={"squares_of_three": 160, "one_patch": 160, "large_tiles": 220},  # a tile's place is many tokens
    ),
    "SmolVLMForConditionalGeneration": Family(
        _VARIANTS,
        lambda variant: _config("SmolVLMConfig", variant),
        lambda variant: _processor(SmolVLMImageProcessorPil, variant),
        quick=("squares",),
        words={**_WORDS, VOCAB - 3: _WHOLE, **_PLACES},
        ids=_smolvlm_ids,
        features=_features,
        blocks={"large_tiles": 130},
    ),
}
