"""What surrounds the GPU's kernels: their emulator, and engines on them. The kernels have theirs in tests/kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import dtype, emulated_cuda, order, poison

__all__ = ["dtype", "emulated_cuda", "order", "poison"]

_HERE = Path(__file__).parent
_COMPILED = {"emulated_cuda", "library", "path"}  # fixtures that compile for minutes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and _COMPILED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.emulated)
