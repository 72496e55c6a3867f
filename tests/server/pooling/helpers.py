"""What the tests of this folder share."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

EMBEDDINGS, POOLING, CLASSIFY, SCORE, RERANK = "/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v1/rerank"
TEXTS = ["There is a red circle.", "One day, a blue square", "a", "The green star ran to the garden."]
QUERY, DOCUMENTS = "a red circle", ["the sea is blue", "circles are round, and red", "a red circle", "b"]
MOST = 40  # tokens of the cross-encoder's prompts


def vector(values: list[float]) -> np.ndarray:
    """Of an answer's JSON: the float32 numbers that the engine made."""
    row = np.array(values, np.float32)
    assert np.array_equal(row.astype(np.float64), np.array(values)), "digits that are of no float32"
    return row


def make_bert(path: Path, labels: list[str]) -> Path:
    """A tiny random classifier, whose words are letters."""
    vocab = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_letters()])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MOST,
        initializer_range=0.4,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: place for place, label in enumerate(labels)},
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(path)
    return path


def _letters() -> list[str]:
    return [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase), *",."]


def engine(**settings: Any) -> dict[str, Any]:
    """Of a server in this process, of a model that pools."""
    return {"runner": "pooling", "num_gpu_blocks_override": 512, **settings}
