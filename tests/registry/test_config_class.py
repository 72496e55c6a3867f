"""Checkpoints whose configuration only their own code knows: a row brings a class for it, and the code is not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from quire import registry
from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.loader import load_config, load_model
from quire.registry import Row
from tests.models import run_model, tiny

LLAMA = "LlamaForCausalLM"
OWN = f"{__name__}:OwnConfig"


class OwnConfig(PretrainedConfig):
    """A Llama's fields under a type of their own."""

    model_type = "own_llama"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"hidden_act": "silu", "rope_theta": 500.0, **fields})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tiny Llama that says that its code is to be run."""
    folder = tiny.build(LLAMA, "rope_default", tmp_path / "own")
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields = {name: value for name, value in fields.items() if name not in ("hidden_act", "rope_parameters")}
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    file.write_text(json.dumps({**fields, "architectures": ["OwnLM"], "model_type": "own_llama", "auto_map": auto_map}))
    (folder / "own.py").write_text("raise SystemExit('the code of a checkpoint has been run')\n")
    return folder


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    target = next(row.target for row in registry.BUILT_IN if row.architecture == LLAMA)
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, Row("OwnLM", target, config=OWN)))
    yield


def test_it_is_read_by_the_rows_class_and_served(row: None, path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, OwnConfig) and config.hidden_size == 32 and config.rope_theta == 500.0
    plain = tiny.build(LLAMA, "rope_default", tmp_path / "plain")
    ids = tiny.token_ids()
    assert run_model.logits(load_model(path), ids).equal(run_model.logits(load_model(plain), ids))


def test_overrides_reach_it(row: None, path: Path) -> None:
    assert load_model(path, overrides={"max_position_embeddings": 64}).max_model_len == 64
    with pytest.raises(CheckpointError, match="none is ever run"):
        load_model(path, overrides={"auto_map": {}})


def test_without_a_row_it_is_refused(path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="never runs code"):
        load_config(path)


def test_a_packages_row_has_its_own_configuration(row: None, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers one with transformers, and quire's is not put before that."""
    monkeypatch.setattr(registry, "plugin_rows", lambda: (Row("OwnLM", "theirs:Model", package="theirs"),))
    with pytest.raises(UnsupportedModelError, match="never runs code"):
        load_config(path)


def test_a_class_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    rows = (*registry.BUILT_IN, Row("OwnLM", "quire.models.llama:LlamaForCausalLM", config="quire.models.nowhere:Own"))
    monkeypatch.setattr(registry, "BUILT_IN", rows)
    with pytest.raises(UnsupportedModelError, match=r"quire\.models\.nowhere:Own"):
        load_config(path)
