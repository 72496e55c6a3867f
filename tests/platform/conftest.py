"""A tiny random Llama with a tokenizer, and an engine on it whose tables are checked after every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = ["The red circle rolls to the blue square.", "Once upon a time a star met a triangle, and they sang: la la la."]


def save_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)


def make_llama(path: Path, dtype: torch.dtype = torch.float32, **settings) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.25,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **settings,
        }
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(path)
    save_tokenizer(path)
    return model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_llama(path)
    return path


@pytest.fixture(scope="session")
def tiny_bf16_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny-bf16")
    make_llama(path, torch.bfloat16)
    return path


@pytest.fixture(scope="session")
def tiny_llm(tiny_path):
    """Shared by tests that must leave it as they found it: each checks that it still answers."""
    from quire import LLM

    return LLM(str(tiny_path), num_gpu_blocks_override=64, max_num_seqs=16, debug=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and written of KV blocks is waited for, however slow the machine is: counts are exact."""
    monkeypatch.setattr("quire.platform.kv.transfers.PATIENCE_SECONDS", 600.0)
    monkeypatch.setattr("quire.platform.engine.core.WRITE_SECONDS", 60.0)
    monkeypatch.setattr("quire.platform.execution.kv_transfer._CLOSE_SECONDS", 60.0)
