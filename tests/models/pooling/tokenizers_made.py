"""Tokenizers of a few words, made on the spot: with special tokens and types as BERT's, as RoBERTa's, or none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "red", "circle", "blue", "square", "star", "sings", "yes", "no", "query", "of", "a", "Paris", "paris"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZE = 64  # of the vocabulary of models beside them


def saved_tokenizer(folder: Path, like: str = "bert", lower: bool = False, **more: Any) -> PreTrainedTokenizerFast:
    """like: "bert", pairs with types; "roberta", pairs with two separators; "bare", texts end to end."""
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(SPECIAL + WORDS)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    pairs = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "[CLS] $A [SEP] [SEP] $B [SEP]"}
    if like in pairs:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pairs[like], special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", **{"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **more},
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def texts(count: int, seed: int = 1, least: int = 1, most: int = 30) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(least, most))) for _ in range(count)]
