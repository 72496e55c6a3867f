"""/score, /rerank and /classify, under all of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from tests.server.api_answers import post, refusal
from tests.server.api_server import LocalServer
from tests.server.pooling.helpers import CLASSIFY, DOCUMENTS, EMBEDDINGS, QUERY, TEXTS, engine

pytestmark = pytest.mark.usefixtures("one_thread")

SIDES = [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]


@pytest.fixture(scope="module")
def pair_llm(pair_model: Path) -> LLM:
    return LLM(str(pair_model), num_gpu_blocks_override=512)


def scored(llm: LLM, first: Any, second: Any, **settings: Any) -> list[float]:
    return [one.outputs.score for one in llm.score(first, second, use_tqdm=False, **settings)]


def told(answer: dict[str, Any]) -> list[float]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["score"] for one in answer["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(("one", "other"), SIDES)
def test_pairs_have_the_scores_that_they_have_without_a_server(
    pairs: LocalServer, pair_llm: LLM, path: str, one: str, other: str
) -> None:
    with pairs.http() as http:
        answer = post(http, path, **{one: QUERY, other: DOCUMENTS})
        assert told(answer) == scored(pair_llm, QUERY, DOCUMENTS)
        assert answer["object"] == "list" and {item["object"] for item in answer["data"]} == {"score"}
        assert len(set(told(answer))) == len(DOCUMENTS)
        each = post(http, path, **{one: DOCUMENTS[::-1], other: DOCUMENTS})
        assert told(each) == scored(pair_llm, DOCUMENTS[::-1], DOCUMENTS)
        bare = post(http, path, **{one: [QUERY], other: DOCUMENTS[0]}, use_activation=False)
        assert told(bare) != told(answer)[:1]


def test_an_embedder_scores_by_its_vectors(http: Any, llm: LLM) -> None:
    assert told(post(http, "/score", text_1=TEXTS[0], text_2=TEXTS)) == scored(llm, TEXTS[0], TEXTS)
    assert told(post(http, "/score", text_1=TEXTS[::-1], text_2=TEXTS)) == scored(llm, TEXTS[::-1], TEXTS)
    assert told(post(http, "/score", text_1=TEXTS[0], text_2=TEXTS, model="french")) != scored(llm, TEXTS[0], TEXTS)


def test_an_embedder_of_all_tokens_scores_by_late_interaction() -> None:
    settings = engine(convert="embed", pooler_config={"pooling_type": "ALL"})
    expected = scored(LLM(**settings), TEXTS[0], TEXTS)
    with LocalServer(settings) as server, server.http() as http:
        assert told(post(http, "/score", text_1=TEXTS[0], text_2=TEXTS)) == expected
        ranked = post(http, "/rerank", query=TEXTS[0], documents=TEXTS)["results"]
        assert {one["index"]: one["relevance_score"] for one in ranked} == dict(enumerate(expected))
        assert "call /pooling" in refusal(http, EMBEDDINGS, input="a")["message"]
        assert "it has /pooling, /score and /rerank" in refusal(http, "/v1/completions", prompt="a")["message"]
        server.until_idle()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(pairs: LocalServer, pair_llm: LLM, path: str) -> None:
    documents = [{"text": one} if place % 2 else one for place, one in enumerate(DOCUMENTS)]
    scores = scored(pair_llm, QUERY, DOCUMENTS)
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    with pairs.http() as http:
        answer = post(http, path, query=QUERY, documents=documents, model=None)
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [(p, scores[p]) for p in order]
        shown = path != "/v2/rerank"
        assert all(("document" in one) is shown for one in answer["results"])
        assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
        two = post(http, path, query=QUERY, documents=documents, top_n=2, return_documents=True)
        assert [one["document"]["text"] for one in two["results"]] == [DOCUMENTS[place] for place in order[:2]]
        none = post(http, path, query=QUERY, documents=documents, top_n=0, return_documents=False)
        assert len(none["results"]) == len(DOCUMENTS) and "document" not in none["results"][0]


def test_equal_documents_keep_their_order(pairs: LocalServer) -> None:
    with pairs.http() as http:
        answer = post(http, "/rerank", query=QUERY, documents=["a"] * 5)
    assert [one["index"] for one in answer["results"]] == [0, 1, 2, 3, 4]


def test_classes(classes: LocalServer, class_model: Path) -> None:
    llm = LLM(str(class_model), num_gpu_blocks_override=512)
    expected = [one.outputs.probs for one in llm.classify(DOCUMENTS, use_tqdm=False)]
    with classes.http() as http:
        answer = post(http, CLASSIFY, input=DOCUMENTS)
        assert [one["probs"] for one in answer["data"]] == expected
        for one in answer["data"]:
            assert one["num_classes"] == 3 and sum(one["probs"]) == pytest.approx(1, abs=1e-6)
            assert one["label"] == ["bad", "fair", "good"][int(np.argmax(one["probs"]))]
        bare = post(http, CLASSIFY, input=DOCUMENTS[0], use_activation=False)["data"][0]["probs"]
        assert sum(bare) != pytest.approx(1, abs=1e-3)
        rows = post(http, "/pooling", input=DOCUMENTS, task="classify")
        assert [one["data"] for one in rows["data"]] == expected


def test_sagemakers_route_tells_bodies_apart(pairs: LocalServer, classes: LocalServer, http: Any) -> None:
    with pairs.http() as scores, classes.http() as named:
        assert len(post(scores, "/invocations", query=QUERY, documents=DOCUMENTS)["results"]) == len(DOCUMENTS)
        assert told(post(scores, "/invocations", text_1=QUERY, text_2=QUERY))
        assert post(named, "/invocations", input="a")["data"][0]["label"]
    assert post(http, "/invocations", input="a")["data"][0]["embedding"]
