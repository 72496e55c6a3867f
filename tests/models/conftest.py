"""The fixtures of tests/models/fixtures.py; and one thread, as the models are tiny."""

from __future__ import annotations

import pytest

from tests.models.fixtures import checkpoint  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def without_team(one_thread: None) -> None:
    """Threads have tests of their own (tests/kernels, tests/platform)."""
