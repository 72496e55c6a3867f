"""docs/adding-a-route.md: its code makes a route that works, and is bounded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer

from quire.demo import model_path
from quire.server.responses.errors import DOCUMENTED
from quire.server.schemas import openai
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-route.md").read_text(encoding="utf-8")
BODY, ROUTE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """With what the page says to write, where it says."""
    with pytest.MonkeyPatch.context() as patch:
        exec(BODY, vars(openai))
        module = ModuleType("quire.server.routes.counts")
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(ROUTE, "counts.py", "exec", dont_inherit=True), vars(module))
        with LocalServer(max_prompts=4) as running:
            running.app.include_router(module.router, responses=DOCUMENTED)
            yield running
        del openai.CountRequest  # type: ignore[attr-defined]


def test_it_answers(server: LocalServer) -> None:
    texts, tokenizer = ["Once upon a time", "", "Once"], AutoTokenizer.from_pretrained(model_path())
    with server.http() as http:
        answer = http.post("/count", json={"texts": texts})
    assert answer.json() == {"counts": [len(tokenizer(text).input_ids) for text in texts]}


@pytest.mark.parametrize("body", [{"texts": "Once"}, {"texts": ["a"] * 1025}, {"texts": [], "model": "x"}, {}])
def test_it_refuses(server: LocalServer, body: dict[str, object]) -> None:
    with server.http() as http:
        answer = http.post("/count", json=body)
    assert answer.status_code == 400
    assert re.match("texts|model", answer.json()["error"]["param"])
