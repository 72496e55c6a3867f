"""A server that goes in the middle of an answer, and comes back."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.playground import Playground
from tests.browser.tabs import OpenTab
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.fixtures import TEMPLATE, make_model

SOME = re.compile(r".{100}", re.S)


def flags_of(path: Path) -> list[str]:
    flags = ["--model", str(make_model(path, TEMPLATE)), "--served-model-name", "endless"]
    flags += ["--hf-overrides", '{"max_position_embeddings": 16384}', "--num-gpu-blocks-override", "4096"]
    return [*flags, "--override-generation-config", '{"temperature": 0}']


def port_of(server: ServerProcess) -> str:
    return str(urlsplit(server.url).port)


def test_a_server_that_goes_and_comes_back_costs_nothing(open_tab: OpenTab, tmp_path: Path) -> None:
    """What there was of an answer stays; the page sees by itself that the server is back, and asks again."""
    flags = flags_of(tmp_path)
    with ServerProcess(*flags, **ONE_THREAD) as server:
        tab = open_tab(server.url)
        chat = Playground(tab)
        chat.send("Write for long")
        tab.expect("answer-text").to_have_text(SOME)
        tab.expect_fault("ERR_")
        server.process.kill()
        server.process.wait()
        tab.expect("banner").to_contain_text("does not answer")
        tab.expect("answer-error").to_be_visible()
    (before,) = chat.answers()
    assert len(before) >= 100
    tab.check_accessibility()
    with ServerProcess(*flags, "--port", port_of(server), **ONE_THREAD):
        tab.expect("banner").to_have_count(0)
        assert chat.answers() == [before]
        chat.option("max_tokens", 120)
        tab.find("retry").click()
        tab.expect("timings").to_contain_text("→ 120 tokens")
        tab.expect("answer-error").to_have_count(0)
        assert chat.answers()[0][:100] == before[:100]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_engine_s_view_goes_on_when_the_server_is_back(open_tab: OpenTab, tmp_path: Path, end: str) -> None:
    """What was seen stays, and is said to be old; the view begins anew by itself, with the new server's steps alone."""
    flags = flags_of(tmp_path)
    with ServerProcess(*flags, **ONE_THREAD) as server, server.http() as client:
        tab = open_tab(server.url, "#engine")
        tab.expect("link").to_contain_text("live")
        body = {"model": "endless", "prompt": "some steps", "max_tokens": 20}
        assert client.post("/v1/completions", json=body).status_code == 200
        tab.expect("step-said").to_contain_text(re.compile(r"median of the last (1\d|2\d)\b"))
        cached = tab.find("blocks-cached").inner_text()
        assert int(cached) >= 3
        tab.expect_fault("ERR_")
        if end == "killed":
            server.process.kill()
            server.process.wait()
        else:
            assert server.stop() == 0
        tab.expect("link").to_have_text(re.compile("not connected"))
        tab.expect("banner").to_contain_text("does not answer")
    tab.expect("block-map").to_be_visible()
    tab.expect("blocks-cached").to_have_text(cached)
    tab.check_accessibility()
    with ServerProcess(*flags, "--port", port_of(server), **ONE_THREAD):
        tab.expect("link").to_contain_text("live")
        tab.expect("banner").to_have_count(0)
        tab.expect("step-said").to_have_text("No step yet.")
        tab.expect("blocks-cached").to_have_text("0")
