"""Every field of the routes that pool does what the table in docs/server.md says."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types.embedding_create_params import EmbeddingCreateParams

from quire.server.schemas import pooling
from tests.server.api_answers import refusal
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[3] / "docs" / "server.md"
HEADER = "| field | embeddings | pooling | classify | score | rerank | what it does |"
IGNORED = "x-quire-ignored-fields"
PATHS = {
    "embeddings": "/v1/embeddings", "pooling": "/pooling", "classify": "/classify", "score": "/score",
    "rerank": "/rerank",
}  # fmt: skip
HONOURED = {
    "embeddings": pooling.EMBEDDING_FIELDS,
    "pooling": pooling.POOLING_FIELDS,
    "classify": pooling.CLASSIFY_FIELDS,
    "score": pooling.SCORE_FIELDS,
    "rerank": pooling.RERANK_FIELDS,
}
REFUSED = {
    "embeddings": pooling.REFUSED_OF_VECTORS,
    "pooling": pooling.REFUSED_OF_VECTORS,
    "classify": pooling.REFUSED_OF_CLASSES,
    "score": pooling.REFUSED,
    "rerank": pooling.REFUSED_OF_DOCUMENTS,
}
KNOWN = sorted(set().union(*HONOURED.values(), *REFUSED.values(), pooling.ACCEPTED))
LEAST: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "a"},
    "pooling": {"input": "a"},
    "classify": {"input": "a"},
    "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
}
WHO = [{"role": "user", "content": "a"}]
# Of each field that is served: a value that is good, and one of another type.
SAMPLES: dict[str, tuple[Any, Any]] = {
    "model": (None, 5),
    "user": ("somebody", 5),
    "request_id": ("mine", 5),
    "cache_salt": ("salt", 5),
    "truncate_prompt_tokens": (4, "4"),
    "use_activation": (False, "no"),
    "input": (["a", "b"], {"text": "a"}),
    "messages": (WHO, "a"),
    "add_generation_prompt": (True, "yes"),
    "continue_final_message": (True, "yes"),
    "chat_template_kwargs": ({"a": 1}, [1]),
    "mm_processor_kwargs": ({}, "small"),
    "prompt_name": ("", 5),
    "encoding_format": ("base64", "bytes"),
    "dimensions": (192, 192.5),
    "normalize": (False, "no"),
    "task": ("token_embed", "embeds"),
    "text_1": (["a"], 5),
    "text_2": (["a", "b"], {"text": "a"}),
    "data_1": ("a", 5),
    "data_2": ("a", {"content": []}),
    "queries": ("a", 5),
    "items": ("a", [5]),
    "documents": (["a", "b"], 5),
    "query": ("a", ["a"]),
    "top_n": (1, "1"),
    "return_documents": (False, "no"),
}
OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs")
# What a field stands in the place of, or needs beside it.
INSTEAD: dict[str, dict[str, Any]] = {
    **{name: {"input": None, "messages": WHO} for name in ("messages", *OF_MESSAGES)},
    "data_1": {"text_1": None, "text_2": None, "data_2": "b"},
    "data_2": {"text_1": None, "text_2": None, "data_1": "b"},
    "queries": {"text_1": None, "text_2": None, "items": "b"},
    "items": {"text_1": None, "text_2": None, "queries": "b"},
}
OF_SCORES = {"documents": {"text_1": None, "text_2": None, "queries": "b"}}
ASKING: dict[str, Any] = {
    "priority": 1, "add_special_tokens": False, "truncation_side": "left", "input_type": "query",
    "instruction": "find it", "embed_dtype": "float16", "endianness": "big", "chat_template": "{{ messages }}",
    "max_tokens_per_doc": 10, "rank_fields": ["title"],
}  # fmt: skip
SENT: dict[str, Any] = {
    "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "keep_alive": "5m", "max_chunks_per_doc": 5,
}  # fmt: skip


def status_of(route: str, field: str) -> str:
    if field in pooling.ACCEPTED:
        return "accepted"
    return "served" if field in HONOURED[route] else "refused" if field in REFUSED[route] else "-"


def of(status: str) -> list[tuple[str, str]]:
    return [(route, field) for route in PATHS for field in KNOWN if status_of(route, field) == status]


@pytest.fixture
def ask(http: Any, classes: LocalServer) -> Any:
    """A client of a server that has the route."""
    with classes.http() as named:
        yield lambda route: named if route == "classify" else http


def test_the_table_says_of_each_field_what_the_server_does() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows: dict[str, tuple[str, ...]] = {}
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        names, *statuses, what = (cell.strip() for cell in line.split("|")[1:-1])
        assert what, line
        for name in re.findall(r"`([a-z_0-9]+)`", names):
            assert name not in rows, f"{name} stands there twice"
            rows[name] = tuple(statuses)
    assert rows == {field: tuple(status_of(route, field) for route in PATHS) for field in KNOWN}


def test_samples_are_of_the_fields_that_there_are() -> None:
    assert set(SAMPLES) == {field for fields in HONOURED.values() for field in fields}
    assert set(ASKING) == {field for fields in REFUSED.values() for field in fields}
    assert set(SENT) == set(pooling.ACCEPTED)
    assert set(typing.get_type_hints(EmbeddingCreateParams)) <= set(pooling.EMBEDDING_FIELDS)


@pytest.mark.parametrize(("route", "field"), of("served"))
def test_a_served_field_is_taken_and_one_of_another_type_is_not(ask: Any, route: str, field: str) -> None:
    good, bad = SAMPLES[field]
    if route == "classify" and field == "truncate_prompt_tokens":
        good = 3
    if (field in OF_MESSAGES or field == "messages") and route == "classify":  # the classifier has no template
        assert "template" in refusal(ask(route), PATHS[route], messages=WHO)["message"]
        return
    beside = INSTEAD.get(field, OF_SCORES.get(field, {}) if route == "score" else {})
    answer = ask(route).post(PATHS[route], json={**LEAST[route], **beside, field: good})
    assert answer.status_code == 200, answer.text
    assert refusal(ask(route), PATHS[route], **{**LEAST[route], **beside, field: bad})["param"] == field


@pytest.mark.parametrize(("route", "field"), of("refused"))
def test_a_refused_field_is_named(ask: Any, route: str, field: str) -> None:
    told = refusal(ask(route), PATHS[route], **LEAST[route], **{field: ASKING[field]})
    assert (told["param"], told["code"]) == (field, "unsupported_parameter")
    for neutral in (None, *REFUSED[route][field].neutral):
        answer = ask(route).post(PATHS[route], json={**LEAST[route], field: neutral})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("route", "field"), of("accepted"))
def test_an_accepted_field_is_named_in_the_header(ask: Any, route: str, field: str) -> None:
    answer = ask(route).post(PATHS[route], json={**LEAST[route], field: SENT[field]})
    assert (answer.status_code, answer.headers[IGNORED]) == (200, field)


@pytest.mark.parametrize(("route", "field"), of("-"))
def test_a_field_of_other_routes_is_unknown(ask: Any, route: str, field: str) -> None:
    value = {**{name: good for name, (good, _) in SAMPLES.items()}, **ASKING}[field]
    assert "no such field" in refusal(ask(route), PATHS[route], **LEAST[route], **{field: value})["message"]
