"""Faults of a server: adapters that come and go."""

from __future__ import annotations

import pytest

from quire.demo import ADAPTERS
from tests.server.api_server import LocalServer
from tests.server.faults.helpers import (
    COMPLETIONS,
    LOADED,
    InBackground,
    _load,
    _load_all,
    body,
    streamed,
    tokens,
)

pytestmark = pytest.mark.slow

PROMPT = "<|user|>There is a green star. What color is the star?<|end|><|assistant|>"


def test_unloading_waits_for_the_streams_of_an_adapter(bundled: LocalServer) -> None:
    _load_all(bundled)
    name = LOADED[0]
    request = body(PROMPT, 120, model=name, ignore_eos=True)
    alone = tokens(bundled, request)
    with bundled.http() as http, bundled.slowed() as fast:
        streams = [InBackground(bundled, request) for _ in range(3)]
        first = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert first.json()["draining"] is True and first.json()["freed_bytes"] is None  # after unload_timeout
        assert http.post(COMPLETIONS, json=request).status_code == 404  # nobody else gets it
        fast.set()
        assert [streamed(stream.events()) for stream in streams] == [alone] * 3
    bundled.until_idle()
    _load(bundled, name, ADAPTERS[0])
    assert tokens(bundled, request) == alone
    with bundled.http() as http:
        again = http.post("/v1/unload_lora_adapter", json={"lora_name": name}).json()
    assert again["draining"] is False and again["freed_bytes"] > 0


def test_a_reload_in_place_leaves_streams_on_their_version(bundled: LocalServer) -> None:
    _load_all(bundled)
    french, shout = (body(PROMPT, 120, model=name, ignore_eos=True) for name in LOADED)
    alone = [tokens(bundled, french), tokens(bundled, shout)]
    assert alone[0] != alone[1]
    with bundled.slowed() as fast:
        streams = [InBackground(bundled, french) for _ in range(2)]
        _load(bundled, LOADED[0], "shout", load_inplace=True)
        assert any(stream.is_alive() for stream in streams)
        fast.set()
        assert tokens(bundled, french) == alone[1]
        assert [streamed(stream.events()) for stream in streams] == [alone[0]] * 2
    bundled.until_idle()
