"""Every causal family of transformers' runs and is right, or is refused: as the table says that docs show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import kernels
from tests.models import tiny
from tests.models.fallback.families import FOUND, check_recorded, families, make, outcome

TABLE = json.loads(FOUND.read_text(encoding="utf-8"))


def test_many_run() -> None:
    assert sum("runs" in found for found in TABLE.values()) >= 45


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(kernels.backend().__name__ != "quire.kernels.native", reason="the twins are never recorded")
@pytest.mark.parametrize("architecture", [name for name, found in TABLE.items() if "runs" in found])
def test_steps_of_a_family_are_recorded(architecture: str, tmp_path: Path) -> None:
    """Every family that runs: replayed steps have the bits of those that run through Python."""
    path = tiny.save(make(architecture), tmp_path)
    check_recorded(path, "bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", families())
def test_a_family(architecture: str) -> None:
    assert outcome(architecture) == TABLE[architecture]
