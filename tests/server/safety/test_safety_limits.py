"""Safety: limits."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from quire.server.schemas import prompts
from tests.server.api_server import LocalServer
from tests.server.safety.helpers import CHAT, COMPLETIONS, KEYS, USER, asked

pytestmark = pytest.mark.slow

MANY = 150_000  # more than any list of quire's may have
TOO_MUCH = {
    "n": (COMPLETIONS, {"prompt": "a", "n": 129}),
    "n, hugely": (COMPLETIONS, {"prompt": "a", "n": 10**30}),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 10_000}),
    "n of a conversation": (CHAT, {"messages": USER, "n": 129}),
    "beams": (COMPLETIONS, {"prompt": "a", "n": 10_000, "use_beam_search": True}),
    "max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": 10**12}),
    "logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 10_000}),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 257}),
    "very many prompts": (COMPLETIONS, {"prompt": ["a"] * MANY}),
    "very many prompts of tokens": (COMPLETIONS, {"prompt": [[1]] * MANY}),
    "a long text": (COMPLETIONS, {"prompt": "a" * 20_000_000}),
    "many long texts": (COMPLETIONS, {"prompt": ["a" * 1_000_000] * 20}),
    "many tokens": (COMPLETIONS, {"prompt": [1] * 2_000_000}),
    "no tokens": (COMPLETIONS, {"prompt": [1.5] * MANY}),
    "no prompts": (COMPLETIONS, {"prompt": [[1.5] * MANY, ["a"]]}),
    "stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * MANY}),
    "stops that are none": (COMPLETIONS, {"prompt": "a", "stop": [1] * MANY}),
    "a long stop": (COMPLETIONS, {"prompt": "a", "stop": "a" * 1_000_000}),
    "bad words": (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * MANY}),
    "stop tokens": (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * MANY}),
    "biases": (COMPLETIONS, {"prompt": "a", "logit_bias": {str(n): 1.0 for n in range(300_001)}}),
    "fields": (COMPLETIONS, {"prompt": "a", **{f"x{n}": 1 for n in range(MANY)}}),
    "messages": (CHAT, {"messages": USER * MANY}),
    "messages that are none": (CHAT, {"messages": [1] * MANY}),
    "a long message": (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000_000}]}),
    "many parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 99}] * 99_000}]}),
    "empty parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 700_000}]}),
    "parts that are none": (CHAT, {"messages": [{"role": "user", "content": [{}] * 700_000}]}),
    "more sequences than may ever wait": (COMPLETIONS, {"prompt": ["a"] * 200, "n": 8}),
    "images": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}] * 9_000}]},
    ),
    "a salt": (COMPLETIONS, {"prompt": "a", "cache_salt": "a" * 1_000_000}),
    "a name": (COMPLETIONS, {"prompt": "a", "request_id": "a" * 1_000_000}),
    "tokens to be text": ("/detokenize", {"tokens": [1] * 2_000_000}),
    "a text to be tokens": ("/tokenize", {"prompt": "a" * 20_000_000}),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much_is_refused_before_anything_is_done(
    bundled: LocalServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def tokenized(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr("quire.platform.inputs.processor.encode_prompt", tokenized)
    for name in ("encode_prompt", "encode_rendered"):
        monkeypatch.setattr(prompts, name, tokenized)
    if case != "images":  # which are counted when the messages have been rendered
        monkeypatch.setattr(prompts, "render_chat", tokenized)
    path, body = TOO_MUCH[case]
    content = json.dumps(body).encode()
    begun = time.process_time()  # the server's is this process's, and other processes do not count
    status, text = asked(bundled, "POST", path, body=content)
    taken = time.process_time() - begun
    assert status == 400, text
    assert taken < 1.5 and len(text) < 3000


def test_large_bodies_are_few_at_once(plain_model: Path) -> None:
    """What has come of them counts until they are answered."""
    with LocalServer({"model": str(plain_model)}, max_request_bytes=100_000, body_timeout=60) as server:
        host, port = server.url.removeprefix("http://").split(":")
        half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b" " * 95_000
        held = [socket.create_connection((host, int(port))) for _ in range(9)]
        for connection in held:
            connection.sendall(half)
        end = time.monotonic() + 30
        while asked(server, "POST", COMPLETIONS, body={"prompt": "a", "max_tokens": 1})[0] != 429:
            assert time.monotonic() < end, "all of them were taken"
        assert asked(server, "GET", "/health")[0] == 200
        for connection in held:
            connection.close()
        end = time.monotonic() + 30
        while asked(server, "POST", COMPLETIONS, body={"prompt": "a", "max_tokens": 1})[0] != 200:
            assert time.monotonic() < end, "their place is not given back"


def test_a_field_with_a_very_long_name(guarded: LocalServer) -> None:
    status, text = asked(guarded, "POST", COMPLETIONS, KEYS[0], {"prompt": "a", "x" * 1_000_000: 1})
    assert status == 400 and len(text) < 3000
