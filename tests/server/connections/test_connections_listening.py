"""Connections: where it listens."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from fastapi import FastAPI

from quire.errors import QuireError
from quire.server.http.server import listening
from tests.server.connections.helpers import GET, PATIENT, answered, config
from tests.server.wire import InThread

pytestmark = pytest.mark.slow


def test_a_unix_socket_is_taken_over_from_the_dead_alone(app: FastAPI, tmp_path: Any) -> None:
    path = str(tmp_path / "socket")
    for one in listening(config(uds=path)):
        one.close()  # and leaves its file
    with InThread(app, config(PATIENT, uds=path)) as server:
        assert server.url == f"unix:{path}"
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(GET)
                assert answered(client)["path"] == "/echo"
        with pytest.raises(QuireError, match="another server"):
            listening(config(uds=path))
    assert not os.path.exists(path)


def test_an_address_that_cannot_be_had() -> None:
    with pytest.raises(QuireError, match="take another"):
        listening(config(host="192.0.2.1", port=1))
