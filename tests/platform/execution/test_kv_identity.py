"""What a block's identity covers beside the model, which tests of engines change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import kernels
from quire.config import EngineConfig, ModelConfig
from quire.layers.shards import Shard
from quire.models.loader import load_model
from quire.platform.execution import kv_identity
from quire.types import KVSpec
from tests.kernels.exchange_parties import by_messages, shared, together


def test_kernels_that_lie_elsewhere_and_what_resizes_pictures(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_path, torch.float32, torch.device("cpu"))
    config, spec = EngineConfig(ModelConfig(str(tiny_path))), KVSpec(1, 1, 8)

    def identity() -> str:
        return kv_identity.identity(config, tiny_path, model, spec, 64)

    def loaded(name: str) -> Path:
        compiled = tmp_path / f"{name}.so"
        compiled.write_bytes(b"one")
        module = SimpleNamespace(__spec__=SimpleNamespace(origin=str(compiled)))
        monkeypatch.setitem(sys.modules, f"quire.kernels.{name}", module)
        return compiled

    before = identity()
    loaded("_cuda")
    assert identity() == before, "a GPU's kernels compute nothing here: of a worker that has not loaded them, the same"
    compiled = loaded("_C")
    before = identity()
    assert identity() == before
    compiled.write_bytes(b"two")
    assert identity() != before

    before, version = identity(), kv_identity._version
    monkeypatch.setattr(kv_identity, "_version", lambda name: "0" if name == "Pillow" else version(name))
    assert identity() != before


@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="needs the extension")
@pytest.mark.parametrize("kind", [shared, by_messages])
def test_several_workers_have_one_that_depends_on_each(kind: Callable[[int], Iterator[list[Any]]]) -> None:

    def of(own: str, shards: list[Shard]) -> str:
        told = together(3, lambda rank: kv_identity.of_all(own[rank] * 64, shards[rank], None))
        assert len(set(told)) == 1 and len(told[0]) == 64, "all have the same"
        return str(told[0])

    for parties in kind(3):
        shards = [Shard(place, 3, exchange) for place, exchange in enumerate(parties)]
        found = [of(own, shards) for own in ("aaa", "aaa", "baa", "aba", "aab", "bbb")]
        assert found[0] == found[1] and len(set(found)) == 5
