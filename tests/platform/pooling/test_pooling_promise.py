"""A vector has the same bits alone, in a crowd, in chunks, with a prefix that is there, and after a preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, PoolingParams
from tests.models.pooling.worlds import engine, given, prompts, saved
from tests.platform.conftest import make_llama

BERT = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.3}  # fmt: skip


def bert(path: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(1)
    saved(transformers.BertModel(transformers.BertConfig(**BERT)), path, dtype)
    return path


def llama(path: Path, dtype: torch.dtype) -> Path:
    make_llama(path, dtype)
    return path


def vectors(llm: LLM, batch: list[list[int]], **params: Any) -> list[torch.Tensor]:
    outputs = llm.encode(given(batch), PoolingParams(**params), use_tqdm=False)
    assert all(one.failure is None for one in outputs)
    return [one.outputs.data for one in outputs]


@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN", "ALL"])
def test_the_same_bits_alone_and_in_a_crowd(tmp_path: Path, make: Any, dtype: torch.dtype, kind: str) -> None:
    path = make(tmp_path, dtype)
    settings = {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
    batch = prompts(300, [1, 2, 3, 7, 16, 17, 40, 64, *range(5, 61)])
    alone = engine(path, max_num_seqs=1, enable_prefix_caching=False, **settings)
    expected = [vectors(alone, [ids])[0] for ids in batch]
    crowd = engine(path, max_num_seqs=64, max_num_batched_tokens=997, num_gpu_blocks_override=1024, **settings)
    assert all(map(torch.equal, vectors(crowd, batch), expected))
    assert all(map(torch.equal, vectors(crowd, batch[::-1]), expected[::-1]))


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "ALL"])
@pytest.mark.parametrize("budget", [1, 5, 13])
def test_the_same_bits_in_chunks(tmp_path: Path, kind: str, budget: int) -> None:
    path = llama(tmp_path, torch.float32)
    settings = {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
    batch = prompts(300, [1, 2, 29, 64])
    expected = vectors(engine(path, enable_prefix_caching=False, **settings), batch)
    found = vectors(engine(path, max_num_batched_tokens=budget, **settings), batch)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_vectors_that_are_cut_have_the_same_bits_in_chunks(tmp_path: Path, kind: str) -> None:
    path = llama(tmp_path, torch.float32)
    settings: dict[str, Any] = {
        "runner": "pooling", "pooler_config": {"pooling_type": kind}, "hf_overrides": {"matryoshka_dimensions": [16]}
    }  # fmt: skip
    batch = prompts(300, [1, 2, 29, 64])
    expected = vectors(engine(path, enable_prefix_caching=False, **settings), batch, dimensions=16)
    found = vectors(engine(path, max_num_batched_tokens=13, **settings), batch, dimensions=16)
    assert all(len(one) == 16 for one in expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_the_same_bits_with_a_prefix_that_is_there(tmp_path: Path, kind: str) -> None:
    path = llama(tmp_path, torch.float32)
    settings = {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
    first, second = prompts(300, [48, 20])
    batch = [first, first + second, first[:40] + second]
    expected = [vectors(engine(path, enable_prefix_caching=False, **settings), [ids])[0] for ids in batch]
    llm = engine(path, **settings)
    for ids, one in zip([*batch, *batch], [*expected, *expected], strict=True):
        assert torch.equal(vectors(llm, [ids])[0], one)
    hits = llm.llm_engine.stats().prefix_hits
    assert (hits > 0) is (kind == "LAST")  # of a mean, every token must be computed


@pytest.mark.parametrize("make", [bert, llama])
def test_the_same_bits_with_little_room(tmp_path: Path, make: Any) -> None:
    """Sequences wait for blocks, or are preempted and computed again."""
    path = make(tmp_path, torch.float32)
    settings = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}, "block_size": 8}
    batch = prompts(300, [60, 50, 64, 33, 62, 41])
    expected = vectors(engine(path, **settings), batch)
    found = vectors(engine(path, num_gpu_blocks_override=9, max_num_batched_tokens=24, **settings), batch)
    assert all(map(torch.equal, found, expected))


def test_a_prompt_longer_than_a_step_is_computed_whole(tmp_path: Path) -> None:
    path = bert(tmp_path, torch.float32)
    batch = prompts(300, [64, 3, 50, 10])
    expected = vectors(engine(path), batch)
    assert all(map(torch.equal, vectors(engine(path, max_num_batched_tokens=8), batch), expected))
