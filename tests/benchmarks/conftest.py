"""The fixtures of tests/server/fixtures.py."""

from tests.server.fixtures import *  # noqa: F403
