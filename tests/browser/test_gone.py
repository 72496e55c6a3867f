"""A server that goes in the middle of an answer, and comes back."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from tests.browser.playground import Playground
from tests.browser.tabs import OpenTab
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.fixtures import TEMPLATE, make_model

SOME = re.compile(r".{100}", re.S)


def test_a_server_that_goes_and_comes_back_costs_nothing(open_tab: OpenTab, tmp_path: Path) -> None:
    """What there was of an answer stays; the page sees by itself that the server is back, and asks again."""
    flags = ["--model", str(make_model(tmp_path, TEMPLATE)), "--served-model-name", "endless"]
    flags += ["--hf-overrides", '{"max_position_embeddings": 16384}', "--num-gpu-blocks-override", "4096"]
    flags += ["--override-generation-config", '{"temperature": 0}']
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
    with ServerProcess(*flags, "--port", str(urlsplit(server.url).port), **ONE_THREAD):
        tab.expect("banner").to_have_count(0)
        assert chat.answers() == [before]
        chat.option("max_tokens", 120)
        tab.find("retry").click()
        tab.expect("timings").to_contain_text("→ 120 tokens")
        tab.expect("answer-error").to_have_count(0)
        assert chat.answers()[0][:100] == before[:100]
