"""What surrounds the GPU's kernels: their emulator, and engines on them. The kernels have theirs in tests/kernels."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from quire.kernels import backends, reference
from tests.kernels.conftest import dtype, emulated_cuda, order, poison

__all__ = ["dtype", "emulated_cuda", "order", "poison"]

_HERE = Path(__file__).parent
_COMPILED = {"emulated_cuda", "library", "path"}  # fixtures that compile for minutes


@pytest.fixture
def engine_on_emulated_cuda(emulated_cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run on the GPU's kernels, but for what they do in main memory: beside a GPU, a CPU's kernels do that."""
    monkeypatch.setattr(emulated_cuda, "likeliest", reference.likeliest)
    monkeypatch.setattr(backends, "backend", lambda: emulated_cuda)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and _COMPILED & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.emulated)
