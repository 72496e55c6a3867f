"""Of every family: the rows of all tokens, and classes, have the same bits alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, PoolingParams
from tests.models import tiny
from tests.models.pooling import test_bert, test_decoders, test_modernbert, test_rotary_encoders
from tests.models.pooling.worlds import engine, given, prompts, saved


def of_bert(family: str) -> Callable[[str], Any]:
    def make(ending: str) -> Any:
        torch.manual_seed(1)
        model = getattr(transformers, family + ending)(test_bert.config(family, "odd", num_labels=3))
        tiny.randomise(model, 1.5)
        return model

    return make


def of_rotary(family: str, variant: str) -> Callable[[str], Any]:
    return lambda ending: test_rotary_encoders.made(family, ending, variant, num_labels=3)


def of_modern(family: str, variant: str) -> Callable[[str], Any]:
    return lambda ending: test_modernbert.made(family, ending, variant, num_labels=3)


def of_decoder(stem: str, variant: str, **settings: Any) -> Callable[[str], Any]:
    def make(ending: str) -> Any:
        architecture = test_decoders.CLASSIFIERS[stem][0]
        if ending == "Model":
            return test_decoders.bare(architecture, variant, **settings).base_model
        return test_decoders.with_head(stem, ending, variant, num_labels=3, pad_token_id=0, **settings)

    return make


FAMILIES = {
    **{name: of_bert(name) for name in ("Roberta", "DistilBert")},
    **{name: of_bert(name) for name in ("Electra", "Albert", "MPNet")},
    "Gte": of_rotary("Gte", "odd"),
    "NomicBert": of_rotary("NomicBert", "yarn"),
    "JinaEmbeddingsV3": of_rotary("JinaEmbeddingsV3", "dynamic"),
    "ModernBert": of_modern("ModernBert", "odd"),
    "ModernBert_mean": of_modern("ModernBert", "biases"),
    "EuroBert": of_modern("EuroBert", "grouped"),
    "EuroBert_late": of_modern("EuroBert", "plain"),
    "Qwen2_windows": of_decoder("Qwen2", "windows"),
    "Gemma3_both_ways": of_decoder("Gemma3", "no_window", use_bidirectional_attention=True, sliding_window=9),
    "Gemma2": of_decoder("Gemma2", "small_caps"),
    "GPT2": of_decoder("GPT2", "n_inner"),
    "OPT": of_decoder("OPT", "no_affine"),
    "Bloom": of_decoder("Bloom", "six_heads"),
    "Phi3": of_decoder("Phi3", "longrope"),
    "Mixtral": of_decoder("Mixtral", "window"),
}
# More than a step takes; long and short ones.
LENGTHS = [1, 2, 3, 7, 16, 17, 40, 64, *range(5, 61, 3)]


def found(llm: LLM, batch: list[list[int]], task: Any) -> list[torch.Tensor]:
    outputs = llm.encode(given(batch), PoolingParams(task=task), use_tqdm=False)
    assert all(one.failure is None for one in outputs)
    return [one.outputs.data for one in outputs]


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    ("ending", "task", "dtype"),
    [("Model", "token_embed", torch.bfloat16), ("ForSequenceClassification", "classify", torch.float32)],
)
def test_the_same_bits_alone_and_in_a_crowd(
    tmp_path: Path, family: str, ending: str, task: str, dtype: torch.dtype
) -> None:
    model = FAMILIES[family](ending)
    saved(model, tmp_path, dtype)
    longest = 64 if getattr(model.config, "max_position_embeddings", 128) >= 64 else 40
    batch = [ids[:longest] for ids in prompts(tiny.VOCAB, LENGTHS)]
    alone = engine(tmp_path, runner="pooling", max_num_seqs=1, enable_prefix_caching=False)
    expected = found(alone, batch, task)
    room = {"max_num_batched_tokens": 401, "num_gpu_blocks_override": 512}
    crowd = engine(tmp_path, runner="pooling", max_num_seqs=64, **room)
    assert all(map(torch.equal, found(crowd, batch, task), expected))
    assert all(map(torch.equal, found(crowd, batch[::-1], task), expected[::-1]))
