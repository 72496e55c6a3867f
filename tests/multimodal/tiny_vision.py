"""Tiny random vision-language models with image processors and tokenizers, and transformers' answers to compare with.

`TABLE` lists the variants of each architecture; `build` saves one; `Oracle` runs it in transformers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.models.tiny import randomise
from tests.platform.conftest import save_tokenizer

VOCAB = 384
IMAGE = 383  # the image token's id
SIDE = 24

_CLIP = ("CLIPVisionConfig", {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 8, "projection_dim": 32,
})  # fmt: skip
_SIGLIP = ("SiglipVisionConfig", {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 8,
})  # fmt: skip
_LLAMA = ("LlamaConfig", {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
})  # fmt: skip
_QWEN2 = ("Qwen2Config", {**_LLAMA[1], "tie_word_embeddings": True})
_OPT = ("OPTConfig", {
    "vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "word_embed_proj_dim": 32, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
})  # fmt: skip
_GPT2 = ("GPT2Config", {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
})  # fmt: skip
_GRIDS = {"image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]}
_QWEN_VISION = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "mlp_ratio": 2,
}  # fmt: skip
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}
_YARN = {**_QWEN_ROPE, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}

# architecture -> variant -> (tower, text model, settings of the whole)
TABLE: dict[str, dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    "LlavaForConditionalGeneration": {
        "clip": (_CLIP, _LLAMA, {}),
        "clip_layers": (
            _CLIP,
            _LLAMA,
            {"vision_feature_layer": [-3, -1, 1], "vision_feature_select_strategy": "full"},
        ),
        "clip_first_layer": (_CLIP, _LLAMA, {"vision_feature_layer": 1, "projector_hidden_act": "gelu_pytorch_tanh"}),
        "clip_no_bias": (_CLIP, _LLAMA, {"multimodal_projector_bias": False, "projector_hidden_act": "silu"}),
        "siglip": (_SIGLIP, _LLAMA, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
        "siglip_default": (_SIGLIP, _LLAMA, {"vision_feature_layer": [1, -1]}),
        "qwen2_tied": (_CLIP, _QWEN2, {"tie_word_embeddings": True}),
        "opt": (_CLIP, _OPT, {}),
        "gpt2": (_CLIP, _GPT2, {}),
    },
    "LlavaNextForConditionalGeneration": {
        "clip": (_CLIP, _LLAMA, _GRIDS),
        "layers": (_CLIP, _QWEN2, {**_GRIDS, "vision_feature_layer": [-1, -2], "multimodal_projector_bias": False}),
        "siglip_full": (_SIGLIP, _LLAMA, {**_GRIDS, "vision_feature_select_strategy": "full"}),
    },
    "Qwen2VLForConditionalGeneration": {
        "mrope": (_QWEN_VISION, {**_LLAMA[1], "rope_parameters": _QWEN_ROPE}, {}),
        "yarn": (_QWEN_VISION, {**_LLAMA[1], "rope_parameters": _YARN}, {}),
        "tied": (
            {**_QWEN_VISION, "hidden_act": "gelu", "depth": 1},
            {**_LLAMA[1], "rope_parameters": {**_QWEN_ROPE, "mrope_section": [2, 1, 1]}},
            {"tie_word_embeddings": True},
        ),
    },
}  # fmt: skip

CASES = [(architecture, variant) for architecture, table in TABLE.items() for variant in table]


def make(architecture: str, variant: str, seed: int = 0) -> Any:
    """The Hugging Face model of a variant, float32, in eval mode, every parameter random."""
    tower, text, settings = copy.deepcopy(TABLE[architecture][variant])
    if architecture.startswith("Qwen2VL"):
        config = transformers.Qwen2VLConfig(
            vision_config=tower, text_config=text, image_token_id=IMAGE, video_token_id=VOCAB - 2,
            vision_start_token_id=VOCAB - 3, vision_end_token_id=VOCAB - 4, **settings,
        )  # fmt: skip
    else:
        kind = transformers.LlavaNextConfig if "Next" in architecture else transformers.LlavaConfig
        config = kind(
            vision_config=getattr(transformers, tower[0])(**tower[1]),
            text_config=getattr(transformers, text[0])(**text[1]),
            image_token_index=IMAGE,
            **settings,
        )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").float().eval()
    _randomise(model, 4.0 if variant in ("opt", "gpt2") else 2.5)  # learned positions need more to be outweighed
    return model


def _randomise(model: Any, gain: float) -> None:
    """The text model as in the tests of text; a tower and a projector of which every part shows in the features."""
    randomise(model.model.language_model, gain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name:
                continue
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "lm_head" in name:
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 1:  # class embedding, newline
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, (1.5 / parameter[0].numel()) ** 0.5)


def image_processor(architecture: str, variant: str) -> Any:
    if architecture.startswith("Qwen2VL"):
        return Qwen2VLImageProcessorPil(
            patch_size=4, temporal_patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 2048}
        )
    if "Next" in architecture:
        return LlavaNextImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, **_GRIDS
        )
    if TABLE[architecture][variant][0] is _SIGLIP:
        return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def build(architecture: str, variant: str, directory: str | Path, model: Any = None) -> Path:
    """Save a variant with its image processor and a tokenizer that knows "<image>"."""
    (model or make(architecture, variant)).save_pretrained(directory)
    image_processor(architecture, variant).save_pretrained(directory)
    save_tokenizer(Path(directory))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    fill = [f"<fill{number}>" for number in range(IMAGE - len(tokenizer))]
    tokenizer.add_tokens(fill)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    tokenizer.save_pretrained(directory)
    return Path(directory)


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """A picture of random colours, (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Oracle:
    """A variant in transformers: features, and greedy answers to prompts of ids with one marker an image."""

    def __init__(self, architecture: str, variant: str) -> None:
        self.model = make(architecture, variant)
        self.processor = image_processor(architecture, variant)
        self.mrope = architecture.startswith("Qwen2VL")

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        """[tokens, E]"""
        inputs = self.processor(image, return_tensors="pt")
        return self.model.get_image_features(**inputs).pooler_output[0]

    @torch.inference_mode()
    def answer(self, ids: list[int], images: list[Image.Image], tokens: int) -> tuple[list[int], list[int]]:
        """(expanded prompt, greedy tokens), run alone, in float64."""
        lengths = iter([len(self.features(image)) for image in images])
        expanded = [token for one in ids for token in ([IMAGE] * next(lengths) if one == IMAGE else [one])]
        inputs: dict[str, Any] = dict(self.processor(images, return_tensors="pt")) if images else {}
        if self.mrope:
            inputs["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in expanded]])
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        wide = self.model.double()
        try:
            out = wide.generate(
                input_ids=torch.tensor([expanded]), attention_mask=torch.ones(1, len(expanded), dtype=torch.int64),
                max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
                **inputs,
            )  # fmt: skip
        finally:
            self.model.float()
        return expanded, out[0, len(expanded) :].tolist()
