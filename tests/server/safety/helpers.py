"""What the tests of this folder share."""

from __future__ import annotations

import http.client
import json
from typing import Any

from tests.server.api_server import LocalServer, ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEYS, ADMIN = ("first-key", "second-key"), "the-admin-key"
USER = [{"role": "user", "content": "a"}]


def asked(
    server: LocalServer | ServerProcess,
    method: str,
    path: str,
    key: str | None = None,
    body: Any = None,
    **headers: str,
) -> tuple[int, str]:
    """(status, body) of a request whose path is sent as it stands here."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **headers}
    if key is not None:
        sent.setdefault("Authorization", f"Bearer {key}")
    connection.request(method, path, content, sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text
