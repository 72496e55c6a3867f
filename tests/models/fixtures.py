"""Tiny checkpoints, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers.utils import logging

from tests.models import tiny

logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """checkpoint(architecture, variant) -> its directory; not to be written to."""

    @cache
    def build(architecture: str, variant: str) -> Path:
        return tiny.build(architecture, variant, tmp_path_factory.mktemp(f"{architecture}-{variant}"))

    return build
