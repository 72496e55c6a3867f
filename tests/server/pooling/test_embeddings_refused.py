"""Bodies of the routes that pool: what is refused, and in which words."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from quire.platform.execution import pooling_runner
from tests.server.api_answers import error_of, post, refusal
from tests.server.api_server import LocalServer
from tests.server.faults.helpers import until
from tests.server.pooling.helpers import CLASSIFY, EMBEDDINGS, MOST, POOLING, RERANK, SCORE, engine
from tests.server.wire import message

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "input: is missing"),
        ({"input": []}, "input: is empty"),
        ({"input": [[]]}, "input[0]: the prompt is empty"),
        ({"input": [[1, 5], [5, 10**6]]}, "input[1]: prompt token 1 is 1000000"),
        ({"input": [[1, 5], [-1]]}, "input[1]: prompt token 0 is -1"),
        ({"input": ["a", 5]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "the limit is 2048 (--max-texts)"),
        ({"input": "a" * (1 << 20) + "b"}, "input: has 1048577 characters"),
        ({"input": ["a", "red " * 3000]}, "your input[1] resulted in 3002 tokens"),
        ({"input": [5] * 3000}, "your input resulted in 3000 tokens"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "not both"),
    ],
)
def test_an_input_that_is_none(http: Any, given: dict[str, Any], words: str) -> None:
    for path in (EMBEDDINGS, POOLING):
        told = refusal(http, path, **given)
        assert words in told["message"] and told["param"] == "input"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dimensions", 0, "whole number"),
        ("dimensions", 64, "192 numbers"),
        ("dimensions", 193, "192 numbers"),
        ("dimensions", "64", "integer"),
        ("encoding_format", "bytes", "'float' or 'base64'"),
        ("truncate_prompt_tokens", 0, "whole number"),
        ("truncate_prompt_tokens", 2049, "2048"),
        ("prompt_name", "query", "prompts are: none"),
        ("cache_salt", "", "1 to 1024"),
        ("embed_dtype", "float16", "32 bits"),
        ("add_special_tokens", False, "send token ids"),
        ("add_generation_prompt", True, "is for messages"),
        ("frobnicate", 1, "no such field"),
    ],
)
def test_a_field_that_cannot_be_honoured(http: Any, field: str, value: Any, words: str) -> None:
    told = refusal(http, EMBEDDINGS, input="a", **{field: value})
    assert words in told["message"] and told["param"] == field


def test_bytes_that_are_no_text(http: Any) -> None:
    deep = b'{"input": ' + b"[" * 9999
    for content in (b'{"input": "\\ud800"}', b'{"input": "\xff"}', b'{"input": NaN}', b"[]", b"", deep):
        answer = http.post(EMBEDDINGS, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and error_of(answer)


def test_an_embedder_has_no_classes(http: Any) -> None:
    told = refusal(http, CLASSIFY, input="a")
    assert "--convert embed" in told["message"] and "embed, token_embed" in told["message"]


def test_a_classifier_has_no_vectors_and_no_pairs(classes: LocalServer) -> None:
    with classes.http() as http:
        assert "--convert classify" in refusal(http, EMBEDDINGS, input="a")["message"]
        assert "classify, token_classify" in refusal(http, SCORE, text_1="a", text_2="b")["message"]
        assert refusal(http, POOLING, input="a", task="embed")["param"] == "task"
        assert refusal(http, CLASSIFY, input="a " * MOST)["code"] == "context_length_exceeded"
        content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]
        assert refusal(http, CLASSIFY, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (SCORE, {"text_1": "a"}, None),
        (SCORE, {"text_1": "a", "data_2": "b"}, None),
        (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, None),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"queries": "a", "documents": []}, "documents"),
        (SCORE, {"data_1": [], "data_2": "a"}, "data_1"),
        (SCORE, {"data_1": "a", "data_2": ["a"] * 2049}, "data_2"),
        (SCORE, {"data_1": "a", "data_2": ["b", "a " * MOST]}, "data_2"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": [{"txt": "a"}]}, "documents"),
        (RERANK, {"query": "a", "documents": ["a", {"text": 5}]}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        (RERANK, {"query": "a", "documents": ["a"], "max_tokens_per_doc": 10}, "max_tokens_per_doc"),
    ],
)
def test_pairs_that_are_none(pairs: LocalServer, path: str, given: dict[str, Any], param: str | None) -> None:
    with pairs.http() as http:
        assert refusal(http, path, **given)["param"] == param


def test_a_document_that_is_too_long_is_told_by_its_place(pairs: LocalServer) -> None:
    with pairs.http() as http:
        told = refusal(http, RERANK, query="a", documents=["a", {"text": "b " * MOST}])
        assert "your documents[1] resulted in" in told["message"] and told["param"] == "documents"
        assert post(http, RERANK, query="a", documents=["b " * MOST], truncate_prompt_tokens=-1)["results"]


def test_no_answer_has_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(engine(convert="embed")) as server, server.http() as http:
        assert post(http, EMBEDDINGS, input="a")
        monkeypatch.setattr(pooling_runner, "_activated", lambda row, activation: row * np.float32("nan"))
        for encoding in ("float", "base64"):
            told = refusal(http, EMBEDDINGS, 500, input=["a", "b"], encoding_format=encoding)
            assert "no number" in told["message"]
        server.until_idle()


# -- crowds and clients that go -----------------------------------------------------------------------------------


def test_a_full_queue_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(engine(convert="embed", max_num_seqs=2), max_queue=0) as server:
        gate = threading.Event()
        step = server.engine.llm_engine.step
        monkeypatch.setattr(server.engine.llm_engine, "step", lambda: (gate.wait(60), step())[1])
        with server.http() as http:
            first = threading.Thread(target=lambda: http.post(EMBEDDINGS, json={"input": ["a", "b"]}))
            first.start()
            until(lambda: server.app.state.context.sequences == 2)
            answer = http.post(EMBEDDINGS, json={"input": "c"})
            assert answer.status_code == 429 and answer.headers["retry-after"]
            assert error_of(answer)["code"] == "queue_full"
            gate.set()
            first.join()
            assert post(http, EMBEDDINGS, input="c")
        server.until_idle()


def test_a_client_that_goes_aborts_all_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(engine(convert="embed")) as server:
        gate, seen = threading.Event(), threading.Event()
        step = server.engine.llm_engine.step

        def slow() -> Any:
            seen.set()
            gate.wait(60)
            return step()

        monkeypatch.setattr(server.engine.llm_engine, "step", slow)
        body = json.dumps({"input": ["a"] * 300}).encode()
        lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        with server._served.connect() as client:
            client.sendall(message("POST", EMBEDDINGS, *lines, body=body))
            assert seen.wait(60)
        until(lambda: not server.app.state.context.sequences)
        gate.set()
        server.until_idle()
        with server.http() as http:
            counts = http.get("/metrics").text
        (line,) = (
            one for one in counts.splitlines() if one.startswith('quire_sequences_finished_total{reason="abort"')
        )
        assert float(line.split()[-1]) > 0
