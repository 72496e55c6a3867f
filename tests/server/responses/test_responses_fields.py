"""Every field of /v1/responses does what the table in docs/responses.md says."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from quire.server.schemas.responses.fields import (
    ACCEPTED_IN_RESPONSES,
    REFUSED_IN_RESPONSES,
    RESPONSES_FIELDS,
    SHARED,
    ResponsesRequest,
)
from tests.server.api_answers import refusal
from tests.server.responses.helpers import GREEDY, PATH, WHO, respond, text_of

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[3] / "docs" / "responses.md"
IGNORED = "x-quire-ignored-fields"
LEAST: dict[str, Any] = {"input": WHO, "max_output_tokens": 2}

# Of each field that is served: a value that is good, and one that is not.
SAMPLES: dict[str, tuple[Any, Any]] = {
    "model": ("quire-demo", 5),
    "input": ([{"role": "user", "content": "a"}], 5),
    "instructions": ("Be brief.", ["Be brief."]),
    "max_output_tokens": (3, 3.5),
    "temperature": (0.7, "warm"),
    "top_p": (0.9, "0.9"),
    "text": ({"format": {"type": "text"}}, {"format": {"type": "xml"}}),
    "reasoning": ({"effort": "low"}, {"effort": "much"}),
    "tools": ([], [{"type": "web_search"}]),
    "tool_choice": ("none", {"type": "mcp", "server_label": "a"}),
    "parallel_tool_calls": (False, "no"),
    "include": (["message.output_text.logprobs"], ["everything"]),
    "top_logprobs": (0, 21),
    "metadata": ({"a": "b"}, {"a": 5}),
    "store": (False, "no"),
    "previous_response_id": (None, "resp_x"),
    "background": (False, True),
    "stream": (True, 1),
    "stream_options": (None, {"include_obfuscation": False}),
    "user": ("ann", 5),
    "safety_identifier": ("ann", 5),
    "request_id": ("name", "two words"),
}
REFUSED: dict[str, Any] = {
    "prompt": {"id": "a"},
    "conversation": "conv_a",
    "truncation": "auto",
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "a"},
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "2h"},
    "image": {"context_compression": "enabled"},
}


def table() -> dict[str, str]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    begin = lines.index("| field | | what it does |") + 2
    rows: dict[str, str] = {}
    for line in lines[begin : lines.index("", begin)]:
        name, status, what = (cell.strip() for cell in line.split("|")[1:-1])
        assert re.fullmatch(r"`[a-z_]+`", name) and name.strip("`") not in rows and what, line
        rows[name.strip("`")] = status
    return rows


def test_the_table_says_of_each_field_what_the_server_does() -> None:
    served = set(RESPONSES_FIELDS) - set(SHARED)
    want = {**dict.fromkeys(served, "served"), **dict.fromkeys(ACCEPTED_IN_RESPONSES, "accepted")}
    assert table() == {**want, **dict.fromkeys(REFUSED_IN_RESPONSES, "refused")}
    assert set(ResponsesRequest.model_fields) == {*table(), *SHARED}
    assert set(SAMPLES) == served and set(REFUSED) == set(REFUSED_IN_RESPONSES)


@pytest.mark.parametrize("params", [ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming])
def test_every_field_of_openais_is_known(params: Any) -> None:
    assert set(typing.get_type_hints(params)) <= set(table())


@pytest.mark.parametrize("field", SAMPLES)
def test_a_served_field_is_taken_and_another_value_refused(http: Any, field: str) -> None:
    good, bad = SAMPLES[field]
    response = http.post(PATH, json={**LEAST, field: good})
    assert response.status_code == 200, response.text
    error = refusal(http, PATH, **{**LEAST, field: bad})
    assert error["param"].split(".")[0] == field and error["message"].startswith(field), error
    if field != "input":
        assert http.post(PATH, json={**LEAST, field: None}).status_code == 200


@pytest.mark.parametrize("field", ACCEPTED_IN_RESPONSES)
def test_an_accepted_field_changes_nothing_and_is_named(http: Any, field: str) -> None:
    response = http.post(PATH, json={**LEAST, **GREEDY, field: "anything"})
    assert (response.status_code, response.headers[IGNORED]) == (200, field)


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_is_named_unless_it_asks_for_nothing(http: Any, field: str) -> None:
    error = refusal(http, PATH, **LEAST, **{field: REFUSED[field]})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    for neutral in (None, *REFUSED_IN_RESPONSES[field].neutral):
        response = http.post(PATH, json={**LEAST, field: neutral})
        assert response.status_code == 200 and IGNORED not in response.headers


def test_unknown_fields_are_refused(http: Any) -> None:
    for field in ("n", "messages", "max_tokens", "best_of", "wizard"):
        assert refusal(http, PATH, **LEAST, **{field: 1})["param"] == field


@pytest.mark.parametrize(
    ("body", "param", "begins"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "text.format.name"),
        ({"text": {"format": {"type": "text", "more": 1}}}, "text.format", "text.format.more"),
        ({"text": {"form": 1}}, "text", "text.form"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity: ask for it in the prompt"),
        ({"reasoning": {"mode": "pro"}}, "reasoning", "reasoning.mode"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning", "reasoning.summary"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a"}] * 129}, "tools", "tools: has 129 entries"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools", "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "a", "defer_loading": True}]}, "tools", "tools[0].defer_loading"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools", "tools[0].type: 'custom' is not served"),
        ({"tools": [{"type": "mcp"}]}, "tools", "tools[0].type: 'mcp' is not served"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice: is none, auto"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "tool_choice: there is no function 'a'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice", "tool_choice: allowed_tools"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "stream_options: there is no"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "stream_options: inclu"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata", "metadata: has at most"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "metadata: has at most"),
        ({"background": True, "store": False}, "background", "background: what is not stored"),
        ({"background": True}, "background", "background: needs a server that keeps"),
        ({"previous_response_id": "a"}, "previous_response_id", "previous_response_id: this server keeps no"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"model": "nobody"}, "model", "model: there is no 'nobody'"),
    ],
)
def test_what_is_wrong_is_named(http: Any, body: dict[str, Any], param: str, begins: str) -> None:
    status = 404 if param == "model" else 400
    error = refusal(http, PATH, status, **{**LEAST, **body})
    assert error["param"] == param and error["message"].startswith(begins), error


def test_what_changes_nothing_is_named(http: Any) -> None:
    want = text_of(respond(http, **LEAST, **GREEDY))
    for body, named in (
        ({"store": True}, "store"),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ):
        answer = http.post(PATH, json={**LEAST, **GREEDY, **body})
        assert (answer.status_code, answer.headers[IGNORED]) == (200, named)
        assert text_of(answer.json()) == want


def test_who_has_gone_leaves_nothing_behind(demo: Any, http: Any) -> None:
    with http.stream("POST", PATH, json={"input": WHO, "stream": True, "ignore_eos": True}) as response:
        next(response.iter_lines())
    respond(http, **LEAST)
