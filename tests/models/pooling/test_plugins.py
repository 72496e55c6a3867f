"""Models that pool, brought by a package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from quire import PoolingParams, registry
from quire.errors import UnsupportedModelError
from quire.models.bert import BertModel
from tests.models.pooling.worlds import change, classes, engine, given, hidden, largest_error, prompts, saved

BARE = PoolingParams(use_activation=False)
SIZES = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 80, "max_position_embeddings": 70, "initializer_range": 0.3, "num_labels": 3}  # fmt: skip
# The last takes the place of one of quire's own.
NAMES = ("OwnModel", "OwnForSequenceClassification", "BertForTokenClassification")


class OwnBert(BertModel):
    """BERT, by another package."""


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = tuple(registry.Row(name, f"{__name__}:OwnBert", package="tests") for name in NAMES)
    monkeypatch.setattr(registry, "plugin_rows", lambda: rows)
    yield


@pytest.mark.parametrize("name", NAMES)
def test_it_generates_nothing(tmp_path: Path, name: str) -> None:
    ending = name.removeprefix("Own").removeprefix("Bert")
    saved(getattr(transformers, f"Bert{ending}")(transformers.BertConfig(**SIZES)), tmp_path)
    change(tmp_path, architectures=[name])
    with pytest.raises(UnsupportedModelError, match=r"runner='generate'.*generates nothing"):
        engine(tmp_path, runner="generate")


@pytest.mark.parametrize("runner", ["auto", "pooling"])
@pytest.mark.parametrize("name", NAMES)
def test_its_architectures_say_what_it_does(tmp_path: Path, name: str, runner: str) -> None:
    torch.manual_seed(1)
    ending = next(
        ending for ending in ("Model", "ForSequenceClassification", "ForTokenClassification") if ending in name
    )
    oracle = saved(getattr(transformers, f"Bert{ending}")(transformers.BertConfig(**SIZES)), tmp_path)
    change(tmp_path, architectures=[name])
    batch = prompts(300, [1, 9, 30])
    llm = engine(tmp_path, runner=runner)
    found = llm.encode(given(batch), BARE, use_tqdm=False)
    expected = [hidden(oracle, ids)[0] if ending == "Model" else classes(oracle, ids) for ids in batch]
    assert largest_error([one.outputs.data for one in found], expected) < 1e-5
    assert isinstance(llm.llm_engine.executor.runner.model, OwnBert)  # no public name tells whose class it is
