"""Weights of which a process reads a part, where the rest has no memory of its own: as on a GPU, but on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from quire.checkpoint import weights
from quire.checkpoint.opening import open_checkpoint
from quire.checkpoint.weights import Extent, packed, side_by_side
from quire.layers.shards import Shard
from quire.models.base import CausalLM
from quire.models.loader import fill_again, load_model
from tests.kernels.exchange_parties import shared, together
from tests.models import rows, run_model
from tests.models.test_staged import BLOCK, CHUNKS, QUICK, REFUSED, Pipe, load, logits
from tests.models.tiny import VOCAB

IDS = [(7 * place) % (VOCAB - 4) + 3 for place in range(sum(CHUNKS))]
EVERY = [
    pytest.param(one, marks=[pytest.mark.slow] * (one not in {*QUICK, "BaichuanForCausalLM"}))
    for one in sorted(rows.all_rows())
]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "side_by_side", packed)


def first_of(checkpoint: Callable[[str, str], Path], architecture: str) -> Path:
    variant = "baichuan2_7b" if architecture == "BaichuanForCausalLM" else next(iter(rows.entry(architecture)[2]))
    return checkpoint(architecture, variant)  # whose projection is normalised where it lies


@pytest.mark.parametrize("architecture", EVERY)
@pytest.mark.parametrize("size", [2, 3])
def test_rows(checkpoint: Callable[[str, str], Path], as_on_a_gpu: None, architecture: str, size: int) -> None:
    path = first_of(checkpoint, architecture)
    expected = run_model.logits(load_model(path), IDS, CHUNKS, block_size=BLOCK)
    with closing(shared(size)) as exchanges:
        parties = next(exchanges)
        own: list[torch.Tensor] = together(size, lambda rank: by_one(path, Shard(rank, size, parties[rank])))
    assert all(torch.equal(one, expected) for one in own)


def by_one(path: Path, shard: Shard) -> torch.Tensor:
    model = load_model(path, shard=shard)
    fill_again(model, open_checkpoint(path, "auto"))  # as one that has slept
    return run_model.logits(model, IDS, CHUNKS, block_size=BLOCK)


@pytest.mark.parametrize("architecture", [one for one in EVERY if one.values[0] not in REFUSED])
def test_layers(checkpoint: Callable[[str, str], Path], as_on_a_gpu: None, architecture: str) -> None:
    path = first_of(checkpoint, architecture)
    whole = load_model(path)
    pipe = Pipe()
    stages = [load(path, number, 2, pipe) for number in range(2)]
    assert torch.equal(logits(stages, IDS), run_model.logits(whole, IDS, CHUNKS, block_size=BLOCK))
    assert sum(map(memory, stages)) < 1.9 * memory(whole), "each has the memory of all layers"


def memory(model: CausalLM) -> int:
    return max(one.untyped_storage().nbytes() for one in model.parameters())


def test_nothing_that_is_read_lies_over_anything_else() -> None:
    rng = random.Random(3)
    for _ in range(300):
        extents = [
            Extent(*(rng.choice([0, rng.randrange(1, 300)]) for _ in range(3))) for _ in range(rng.randint(0, 12))
        ]
        for lay in (packed, side_by_side):
            starts, size = lay(extents)
            taken = set[int]()
            for start, extent in zip(starts, extents, strict=True):
                assert start >= 0 and start + extent.size <= size
                read = set(range(start + extent.front, start + extent.front + extent.read))
                assert not read & taken
                taken |= read
                assert lay is side_by_side or not read or min(read) % 64 == 0


def test_a_part_takes_its_own_memory_alone() -> None:
    """A matrix as large as an embedding, cut in two, behind and in front of layers."""
    for rank in range(2):
        cut = [Extent(rank * half, half, (1 - rank) * half) for half in (4096, 64_000, 8192, 64_000)]
        whole = [Extent(0, 1024, 0)] * 20
        assert packed([*cut, *whole])[1] <= sum(extent.read for extent in (*cut, *whole)) + 64_000
    assert packed([Extent(0, 0, 10_000), Extent(0, 20_000, 0)])[1] == side_by_side([Extent(0, 20_000, 0)])[1]
