"""The fixtures of tests/models/fixtures.py."""

from tests.models.fixtures import checkpoint  # noqa: F401
