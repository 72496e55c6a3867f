"""Other routes: docs/server.md."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from quire.config import ServerConfig
from tests.server.api_answers import post
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.routes.helpers import CHAT, WHO

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[3] / "docs" / "server.md"


def test_the_page_shows_clients_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    """They ask for no temperature: this server's is 0, as of a thousand answers that are drawn some are others."""
    clients = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(clients) >= 2
    with ServerProcess("--override-generation-config", '{"temperature": 0}', **ONE_THREAD) as server:
        for code in clients:
            assert "http://localhost:8000" in code
            exec(code.replace("http://localhost:8000", server.url), {})
            assert capsys.readouterr().out == "Red.\n"


def test_the_page_knows_the_limits() -> None:
    text, config = PAGE.read_text(encoding="utf-8"), ServerConfig()
    for shown in (
        f"`--max-request-bytes`, {config.max_request_bytes >> 20} MiB",
        f"`--header-timeout` {config.header_timeout:g}",
        f"`--body-timeout` {config.body_timeout:g}",
        f"`--max-prompts` {config.max_prompts}",
        f"`--max-n` {config.max_n}",
        f"`--shutdown-timeout` seconds ({config.shutdown_timeout:g})",
        f"listens on {config.host} ",
    ):
        assert shown in " ".join(text.split()), shown


def test_the_page_lists_the_routes(http: Any) -> None:
    paths = {re.sub(r"{\w+}", "NAME", path) for path in http.get("/openapi.json").json()["paths"]}
    shown = set(re.findall(r"`(?:GET |POST |DELETE )?(/[\w/.]*)`", PAGE.read_text(encoding="utf-8")))
    assert paths <= shown, paths - shown


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_asks_stands_in_the_log(demo: ServerProcess, http: Any, field: str) -> None:
    post(http, CHAT, messages=WHO, max_tokens=1, **{field: f"somebody-{field}"})
    end = time.monotonic() + 60
    while f"user=somebody-{field}" not in demo.log:
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
