"""A server of one kind of model, asked for what the other kind does; and what a server of a model that pools shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api_answers import refusal
from tests.server.api_server import LocalServer, ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED = [{"role": "user", "content": "Who are you?"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": ASKED, "stream": True}),
        ("/v1/chat/completions", {"nonsense": 1}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"prompt": "a"}),
        ("/invocations", {"prompt": "a"}),
    ],
)
def test_an_embedder_generates_nothing_and_says_so(http: Any, path: str, body: dict[str, Any]) -> None:
    told = refusal(http, path, **body)["message"]
    assert "makes vectors of texts" in told and "/v1/embeddings" in told and "--runner generate" in told


def test_anthropics_clients_are_told_in_their_words(http: Any) -> None:
    answer = http.post("/v1/messages", json={"messages": ASKED, "max_tokens": 5})
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert "makes vectors of texts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"nonsense": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_generator_says_how_it_would_embed(demo: ServerProcess, path: str, body: dict[str, Any]) -> None:
    with demo.http() as http:
        assert "--runner pooling --convert embed" in refusal(http, path, **body)["message"]


def test_what_runs_is_shown(http: Any, embedder: ServerProcess, classes: LocalServer) -> None:
    assert "this server makes vectors of texts" in embedder.log
    info = http.get("/server_info").json()
    assert info["runner"] == "pooling"
    assert info["pooling"] == {
        "convert": "embed", "tasks": ["embed", "token_embed"], "pooling_type": "LAST", "activation": "normalize",
        "width": 192, "dimensions": None, "labels": [], "prompts": [],
    }  # fmt: skip
    with classes.http() as other:
        assert other.get("/server_info").json()["pooling"]["labels"] == ["bad", "fair", "good"]
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["quire-demo", "french", "shout"]
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    assert http.get("/tokenizer_info").json()["vocab_size"] > 0


def test_browsers_get_a_page_without_a_playground(http: Any) -> None:
    page = http.get("/", headers={"Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html") and "script" not in page.text
    assert "This server makes vectors of texts" in page.text and page.headers["Content-Security-Policy"]
    assert http.get("/").json()["name"] == "quire"


def test_steps_are_counted(http: Any) -> None:
    def finished() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("quire_sequences_finished_total{"))

    before = finished()
    assert http.post("/v1/embeddings", json={"input": ["a", "b", "c"]}).status_code == 200
    assert finished() == before + 3
