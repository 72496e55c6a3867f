"""Tiny random CLIP and SigLIP models, with image processors and tokenizers, and what transformers makes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.models.pooling.tokenizers_made import SPECIAL, WORDS
from tests.models.pooling.worlds import Ids

VOCAB = 64
END, LENGTH = 63, 20  # a text's last token, and tokens of a text that is padded
TEXT = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": LENGTH}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 24, "patch_size": 8}  # fmt: skip
OF_CLIP: dict[str, dict[str, Any]] = {
    "plain": {"text": {"eos_token_id": END}, "projection_dim": 40},
    "odd": {
        "text": {"hidden_size": 45, "num_attention_heads": 3, "hidden_act": "gelu", "eos_token_id": END},
        "vision": {"hidden_size": 33, "num_attention_heads": 3, "image_size": 29, "hidden_act": "gelu"},
        "projection_dim": 75,
    },
    "highest": {"text": {"eos_token_id": 2, "num_hidden_layers": 1}, "projection_dim": 48},
    "one_head": {
        "text": {"num_attention_heads": 1, "eos_token_id": 3, "layer_norm_eps": 1e-4},
        "vision": {"num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 11, "layer_norm_eps": 1e-4},
        "projection_dim": 7,
    },
}
OF_SIGLIP: dict[str, dict[str, Any]] = {
    "plain": {"text": {"projection_size": 32}},
    "odd": {
        "text": {"hidden_size": 45, "num_attention_heads": 3, "hidden_act": "gelu", "projection_size": 33},
        "vision": {"hidden_size": 33, "num_attention_heads": 3, "image_size": 29, "hidden_act": "quick_gelu"},
    },
    "wide": {"text": {"hidden_size": 32, "projection_size": 60}, "vision": {"hidden_size": 60}},
    "one_head": {
        "text": {"num_attention_heads": 1, "num_hidden_layers": 1, "pad_token_id": 0, "projection_size": 32},
        "vision": {"num_attention_heads": 1, "patch_size": 11, "layer_norm_eps": 1e-4},
    },
}
FAMILIES = {"CLIP": OF_CLIP, "Siglip": OF_SIGLIP}
CASES = [(family, variant) for family, variants in FAMILIES.items() for variant in variants]


def made(family: str, variant: str, seed: int = 5) -> Any:
    """transformers' model, of which every parameter shows."""
    given = FAMILIES[family][variant]
    text = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": END, **TEXT, **given.get("text", {})}
    settings = {name: value for name, value in given.items() if name not in ("text", "vision")}
    vision = {**VISION, **given.get("vision", {})}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() == 1 and "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embedding" in name or "probe" in name:
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, (2.0 / parameter[0].numel()) ** 0.5)
    return model


def processor(family: str, variant: str) -> Any:
    """Of images."""
    side = {**VISION, **FAMILIES[family][variant].get("vision", {})}["image_size"]
    if family == "CLIP":
        crop = {"height": side, "width": side}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop)
    return transformers.SiglipImageProcessorPil(size={"height": side, "width": side})


def saved_with_all(family: str, variant: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model with its processor and a tokenizer; return it in float64, with the weights that the file has."""
    model = made(family, variant).to(dtype)
    model.save_pretrained(folder)
    processor(family, variant).save_pretrained(folder)
    padding = FAMILIES[family][variant].get("text", {}).get("pad_token_id", 1)
    save_tokenizer(folder, family, padding)
    return model.double()


def save_tokenizer(folder: Path, family: str, padding: int = 1) -> PreTrainedTokenizerFast:
    """Words; behind a text `END`, and before it a beginning in CLIP's."""
    words = {word: place for place, word in enumerate(SPECIAL + WORDS)} | {"<end>": END}
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    begin = "[CLS] " if family == "CLIP" else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A <end>", special_tokens=[("[CLS]", 2), ("<end>", END)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[padding], unk_token="[UNK]", eos_token="<end>",
        model_max_length=LENGTH, model_input_names=["input_ids"],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def text_vector(model: Any, ids: Ids, padding: int | None = None) -> torch.Tensor:
    """What transformers makes of a text, alone. padding: the token with which it is made as long as any."""
    if padding is not None:
        ids = ids + [padding] * (LENGTH - len(ids))
    with torch.no_grad():
        found: torch.Tensor = model.get_text_features(torch.tensor([ids])).pooler_output[0]
    return found


def image_vector(model: Any, images: Any, image: Image.Image) -> torch.Tensor:
    """What transformers makes of an image, alone. images: their processor."""
    pixels = images(image, return_tensors="pt")["pixel_values"].to(model.dtype)
    with torch.no_grad():
        found: torch.Tensor = model.get_image_features(pixels).pooler_output[0]
    return found
