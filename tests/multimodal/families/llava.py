"""LLaVA and LLaVA-NeXT: (tower, text model, settings of the whole) of each variant."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.multimodal.families.family import IMAGE, LLAMA, SIDE, VOCAB, Family

CLIP = ("CLIPVisionConfig", {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 8, "projection_dim": 32,
})  # fmt: skip
SIGLIP = ("SiglipVisionConfig", {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 8,
})  # fmt: skip
_LLAMA = ("LlamaConfig", LLAMA)
QWEN2 = ("Qwen2Config", {**LLAMA, "tie_word_embeddings": True})
_OPT = ("OPTConfig", {
    "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "word_embed_proj_dim": 32, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
})  # fmt: skip
_GPT2 = ("GPT2Config", {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
})  # fmt: skip
# It multiplies whatever stands in the place of embeddings, an image's features too.
_GRANITE = ("GraniteConfig", {
    **LLAMA, "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
})  # fmt: skip
GRIDS = {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]}

_LLAVA: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "clip": (CLIP, _LLAMA, {}),
    "clip_layers": (
        CLIP, _LLAMA, {"vision_feature_layer": [-3, -1, 1], "vision_feature_select_strategy": "full"},
    ),
    "clip_first_layer": (CLIP, _LLAMA, {"vision_feature_layer": 1, "projector_hidden_act": "gelu_pytorch_tanh"}),
    "clip_no_bias": (CLIP, _LLAMA, {"multimodal_projector_bias": False, "projector_hidden_act": "silu"}),
    "siglip": (SIGLIP, _LLAMA, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "siglip_default": (SIGLIP, _LLAMA, {"vision_feature_layer": [1, -1]}),
    "qwen2_tied": (CLIP, QWEN2, {"tie_word_embeddings": True}),
    "opt": (CLIP, _OPT, {}),
    "gpt2": (CLIP, _GPT2, {}),
}  # fmt: skip
_LLAVA_NEXT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "clip": (CLIP, _LLAMA, GRIDS),
    "layers": (CLIP, QWEN2, {**GRIDS, "vision_feature_layer": [-1, -2], "multimodal_projector_bias": False}),
    "granite": (CLIP, _GRANITE, GRIDS),
    "siglip_full": (SIGLIP, _LLAMA, {**GRIDS, "vision_feature_select_strategy": "full"}),
}


def config(kind: str, variant: Any) -> Any:
    tower, text, settings = variant
    return getattr(transformers, kind)(
        vision_config=getattr(transformers, tower[0])(**tower[1]),
        text_config=getattr(transformers, text[0])(**text[1]),
        image_token_index=IMAGE,
        **settings,
    )


def _processor(variant: Any) -> Any:
    if variant[0][0] == "SiglipVisionConfig":
        return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def _tiles(variant: Any) -> Any:
    return LlavaNextImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, **GRIDS)


_GAINS = {"opt": 4.0, "gpt2": 4.0}  # learned positions need more to be outweighed
FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        _LLAVA, lambda variant: config("LlavaConfig", variant), _processor, gains=_GAINS
    ),
    "LlavaNextForConditionalGeneration": Family(
        _LLAVA_NEXT, lambda variant: config("LlavaNextConfig", variant), _tiles
    ),
}
