"""Every causal family of transformers' runs and is right, or is refused: as the table says that docs show."""

from __future__ import annotations

import json

import pytest

from tests.models.fallback.families import FOUND, families, outcome

TABLE = json.loads(FOUND.read_text(encoding="utf-8"))


def test_many_run() -> None:
    assert sum("runs" in found for found in TABLE.values()) >= 45


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", families())
def test_a_family(architecture: str) -> None:
    assert outcome(architecture) == TABLE[architecture]
