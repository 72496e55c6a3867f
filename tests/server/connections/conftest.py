"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from tests.server.connections.helpers import PATIENT, TIME, application, config
from tests.server.wire import InThread


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application(PATIENT)


@pytest.fixture(scope="module")
def server(app: FastAPI) -> Iterator[InThread]:
    with InThread(app, config(PATIENT)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[InThread]:
    """A machine that is busy with other things may well need longer: for tests of what is too late alone."""
    with InThread(application(TIME), config()) as server:
        yield server
