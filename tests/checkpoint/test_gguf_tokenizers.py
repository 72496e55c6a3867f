"""What a GGUF file says of its tokenizer is believed where it can be, and refused in little time where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from quire.checkpoint.gguf.folder import gguf_folder
from quire.errors import CheckpointError
from tests.checkpoint import gguf_models


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


SIZES = {
    "block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "attention.head_count": 1, "context_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
BYTES = [f"<0x{one:02X}>" for one in range(256)]
PIECES = {
    **SIZES, "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab"],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1], "tokenizer.ggml.scores": [0.0] * 261 + [-1.0],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip
WORDS = {
    **SIZES, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "a", "b", "ab"], "tokenizer.ggml.token_type": [3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0,
}  # fmt: skip


def file_of(tmp_path: Path, pairs: dict[str, Any], rows: int | None = None) -> Path:
    pairs = {name: one for name, one in pairs.items() if one is not None}
    rows = rows or len(pairs["tokenizer.ggml.tokens"])
    tensors = {"token_embd.weight": np.zeros((rows, 8)), "blk.0.attn_q.weight": np.zeros((8, 8))}
    return gguf_models.write(tmp_path / "a.gguf", "llama", pairs, tensors, gguf_models.plain)


@pytest.mark.parametrize(
    ("base", "change", "part"),
    [
        (PIECES, {"tokenizer.ggml.add_bos_token": "false"}, "add_bos_token is 'false': it must be true or false"),
        (PIECES, {"tokenizer.ggml.add_eos_token": 1}, "add_eos_token is 1"),
        (PIECES, {"tokenizer.ggml.add_space_prefix": "no"}, "add_space_prefix is 'no'"),
        (PIECES, {"tokenizer.ggml.bos_token_id": 999}, "bos_token_id is 999, and the tokens are 0 to 261"),
        (PIECES, {"tokenizer.ggml.unknown_token_id": 999}, "unknown_token_id is 999"),
        (WORDS, {"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, and the tokens are 0 to 3"),
        (WORDS, {"tokenizer.ggml.eot_token_id": 4}, "eot_token_id is 4"),
        (WORDS, {"tokenizer.ggml.padding_token_id": 4}, "padding_token_id is 4"),
        (WORDS, {"tokenizer.ggml.eos_token_id": "a"}, "eos_token_id is 'a'"),
        (WORDS, {"tokenizer.ggml.eos_token_id": True}, "eos_token_id is True"),
        (WORDS, {"tokenizer.ggml.merges": ["a b", "ab"]}, "merges has 'ab', which is no pair"),
        (WORDS, {"tokenizer.ggml.suppress_tokens": [1]}, "suppress_tokens, tokens that are never drawn"),
        (WORDS, {"tokenizer.chat_template": 3}, "chat_template must be a text"),
        (WORDS, {"general.sampling.temp": "hot"}, "sampling.temp is 'hot'"),
        (WORDS, {"general.sampling.temp": float("nan")}, "sampling.temp is nan"),
        (PIECES, {"tokenizer.ggml.scores": [float("nan")] * 262}, "scores has numbers that are not finite"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, base, change, part):
    with pytest.raises(CheckpointError, match=part):
        gguf_folder(file_of(tmp_path, {**base, **change}))


def test_more_tokens_than_embeddings(tmp_path):
    with pytest.raises(CheckpointError, match="tokens has 4, and of embeddings there are 3"):
        gguf_folder(file_of(tmp_path, WORDS, rows=3))


@pytest.mark.parametrize("none", [-1, (1 << 32) - 1])
def test_a_token_of_number_minus_one_is_none(tmp_path, none):
    """As old converters wrote it, with a sign or without."""
    path = file_of(tmp_path, {**WORDS, "tokenizer.ggml.bos_token_id": none, "tokenizer.ggml.padding_token_id": none})
    config = json.loads((gguf_folder(path) / "config.json").read_text())
    assert (config["bos_token_id"], config["pad_token_id"], config["eos_token_id"]) == (None, None, 0)


def test_no_bos_where_the_file_says_so(tmp_path):
    path = file_of(
        tmp_path, {**PIECES, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abb")) == ["ab", "b"]


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        (["x" * 200_000], "has one of 200,000 characters"),
        ([f"{one:05}" * 100 for one in range(17_000)], "and 8,500,00. in all"),
    ],
)
def test_tokens_that_would_take_for_ever(tmp_path, tokens, part):
    pairs = dict(PIECES)
    pairs["tokenizer.ggml.tokens"] = [*PIECES["tokenizer.ggml.tokens"], *tokens]
    pairs["tokenizer.ggml.token_type"] = [*PIECES["tokenizer.ggml.token_type"], *[1] * len(tokens)]
    pairs["tokenizer.ggml.scores"] = [*PIECES["tokenizer.ggml.scores"], *[-2.0] * len(tokens)]
    path = file_of(tmp_path, pairs)
    with pytest.raises(CheckpointError, match=part):
        gguf_folder(path)
