"""Checkpoints to read, and copies to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.checkpoints import LLAMA
from tests.models.fixtures import checkpoint  # noqa: F401


@pytest.fixture
def copy_of(checkpoint, tmp_path):  # noqa: F811
    """copy_of(architecture, variant) -> a directory of the test's own."""

    def copy(architecture: str = LLAMA, variant: str = "gqa") -> Path:
        return Path(shutil.copytree(checkpoint(architecture, variant), tmp_path / f"{architecture}-{variant}"))

    return copy
