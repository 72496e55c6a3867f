"""Tiny random vision-language models with image processors and tokenizers, and transformers' answers to compare with.

`families` has the variants of each architecture; `build` saves one; `Oracle` runs it in transformers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.models.tiny import randomise
from tests.multimodal.families import FAMILIES, HEARING
from tests.multimodal.families.family import IMAGE, SIDE, VOCAB
from tests.platform.conftest import save_tokenizer

__all__ = ["CASES", "FAMILIES", "IMAGE", "SIDE", "VOCAB", "Oracle", "build", "image_processor", "make", "picture"]

CASES = [
    pytest.param(architecture, variant, marks=() if variant in (family.quick or family.variants) else pytest.mark.slow)
    for architecture, family in FAMILIES.items()
    for variant in family.variants
]

_ALL = {**FAMILIES, **HEARING}


def make(architecture: str, variant: str, seed: int = 0) -> Any:
    """The Hugging Face model of a variant, float32, in eval mode, every parameter random."""
    family = _ALL[architecture]
    config = family.config(copy.deepcopy(family.variants[variant]))
    torch.manual_seed(seed)
    model = (
        (family.reference or getattr(transformers, family.architecture or architecture))
        ._from_config(config, attn_implementation="eager", experts_implementation="eager")
        .float()
        .eval()
    )
    _randomise(model, family.gains.get(variant, 2.5))
    return model


def _randomise(model: Any, gain: float) -> None:
    """The text model as in the tests of text; a tower and a projector of which every part shows in the features."""
    text = next((name for name in ("text_model", "language_model") if hasattr(model.model, name)), None)
    randomise(model if text is None else getattr(model.model, text), gain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if text in name if text else "vision" not in name:
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
    family = _ALL[architecture]
    return family.processor(copy.deepcopy(family.variants[variant]))


def build(architecture: str, variant: str, directory: str | Path, model: Any = None) -> Path:
    """Save a variant with its image processor and a tokenizer that knows the family's special tokens."""
    (model or make(architecture, variant)).save_pretrained(directory)
    image_processor(architecture, variant).save_pretrained(directory)
    save_tokenizer(Path(directory))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    words = _ALL[architecture].words
    for token in range(len(tokenizer), VOCAB):
        word = words.get(token, f"<fill{token}>")
        tokenizer.add_tokens([word], special_tokens=token in words)
        assert tokenizer.convert_tokens_to_ids(word) == token
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
        self.family = _ALL[architecture]
        self.mrope = self.family.mrope

    def inputs(self, images: Image.Image | list[Image.Image]) -> dict[str, Any]:
        """What the model takes of images."""
        found = self.processor(images, return_tensors="pt")
        names = [name for name in found if name not in self.family.unused]
        return {name: found[name] for name in names if isinstance(found[name], torch.Tensor)}

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        """[features, E * (1 + levels)]"""
        found = self.model.get_image_features(**self.inputs(image))
        levels = getattr(found, "deepstack_features", None) or ()
        return torch.cat([self.family.features(one) for one in (found.pooler_output, *levels)], dim=-1)

    def ids(self, tokenizer: Any, image: Image.Image) -> list[int]:
        """An image's placeholders, as the checkpoint's own processor writes them."""
        if self.family.ids is None:
            return [IMAGE] * len(self.features(image))
        return self.family.ids(tokenizer, self.model.config, self.processor(image))

    def expanded(self, ids: list[int], images: list[Image.Image], tokenizer: Any = None) -> list[int]:
        """A prompt's ids with each image's placeholders for its marker."""
        placed = iter([self.ids(tokenizer, image) for image in images])
        return [token for one in ids for token in (next(placed) if one == IMAGE else [one])]

    @torch.inference_mode()
    def answer(
        self, ids: list[int], images: list[Image.Image], tokens: int, tokenizer: Any = None
    ) -> tuple[list[int], list[int]]:
        """(expanded prompt, greedy tokens), run alone, in float64."""
        expanded = self.expanded(ids, images, tokenizer)
        inputs = self.inputs(images) if images else {}
        if self.mrope:
            inputs["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in expanded]])
        inputs |= self.family.types(expanded)
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
