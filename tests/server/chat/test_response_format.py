"""Answers with a shape: every field that says one, alone and beside what else a request may have."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from quire.demo import picture_path
from tests.server.api_answers import events, joined, post, refusal, strict
from tests.server.chat.helpers import GREEDY, PATH, TOLD, WHO, seen

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ("star", "circle")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": list(SHAPES)}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}

NAMED_BEAMS = {"response_format": NAMED, "use_beam_search": True, "n": 3, "max_tokens": 60}


def fits(text: str) -> bool:
    """Whether it is an object of SCHEMA."""
    found = json.loads(text)
    assert set(found) == {"shape", "count"}, text
    return found["shape"] in SHAPES and isinstance(found["count"], int) and 0 <= found["count"] <= 99


# Each way to say a shape -> what an answer to it is.
WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"response_format": NAMED}, fits),
    "strict": ({"response_format": {**NAMED, "json_schema": {**NAMED["json_schema"], "strict": True}}}, fits),  # type: ignore[dict-item]
    "json_object with a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, fits),
    "structured_outputs": ({"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}, fits),
    "guided_json": ({"guided_json": SCHEMA}, fits),
    "guided_json as a text": ({"guided_json": json.dumps(SCHEMA)}, fits),
    "spaces": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        lambda text: fits(text) and "\n" not in text,
    ),
    "GBNF": ({"guided_grammar": 'root ::= "a" | "b" root'}, re.compile("b*a").fullmatch),
    "structural tags": (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<a>",
                    "end": "</a>",
                    "content": {"type": "regex", "pattern": "[0-9]{2}"},
                },
            }
        },
        re.compile("<a>[0-9]{2}</a>").fullmatch,
    ),
    "structural tags of response_format": (
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}},
        {"so"}.__contains__,
    ),
    "regex": ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
    "choice": ({"guided_choice": ["green", "a red star"]}, {"green", "a red star"}.__contains__),
    "grammar": (
        {"guided_grammar": 'start: "b"* "a"'},
        re.compile("b*a").fullmatch,
    ),
    "regex of structured_outputs": ({"structured_outputs": {"regex": "(yes|no)!"}}, {"yes!", "no!"}.__contains__),
    "text": ({"response_format": {"type": "text"}}, lambda text: True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [{**GREEDY}, {"temperature": 1.5, "seed": 4, "n": 2}], ids=["greedy", "drawn"])
def test_answers_have_the_shape(http: Any, way: str, sampling: dict[str, Any]) -> None:
    fields, right = WAYS[way]
    body = {"messages": TOLD, "max_tokens": 60, **sampling, **fields}
    whole = strict(ChatCompletion, post(http, PATH, **body))
    streamed = joined(events(http, PATH, **body))
    for choice in whole.choices:
        text = choice.message.content
        assert text is not None
        assert way in ("text", "grammar", "GBNF") or choice.finish_reason == "stop"
        assert choice.finish_reason == "length" or right(text), text
        assert streamed[choice.index]["text"] == text
        assert streamed[choice.index]["finish_reason"] == choice.finish_reason


def test_any_json_object(http: Any) -> None:
    body = {"messages": TOLD, "response_format": {"type": "json_object"}, "temperature": 1.0, "max_tokens": 200}
    texts = [post(http, PATH, **body, seed=seed, n=4)["choices"] for seed in range(3)]
    ended = [one["message"]["content"] for some in texts for one in some if one["finish_reason"] == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(one["message"]["content"].lstrip().startswith("{") for some in texts for one in some)


class Seen(BaseModel):
    """What `parse` is to make of an answer."""

    shape: Literal["star", "circle"]
    color: Literal["red", "blue"]


def test_the_sdk_parses_what_comes_whole_and_streamed(client: OpenAI) -> None:
    asked: Any = {"model": "quire-demo", "messages": TOLD, "response_format": Seen, "temperature": 0}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Seen)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message.parsed
    assert final == parsed and "content.done" in kinds


def test_beside_pictures_adapters_stops_and_logprobs(http: Any) -> None:
    look = seen(picture_path(), "What do you see?")
    for model in ("quire-demo", "french"):
        body = {"messages": look, "model": model, "response_format": NAMED, **GREEDY, "logprobs": True}
        (choice,) = post(http, PATH, **body, top_logprobs=2, return_token_ids=True)["choices"]
        assert fits(choice["message"]["content"])
        told = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in told).startswith(choice["message"]["content"])
        assert all(one["logprob"] > -9000 for one in told), "what was generated could be drawn"
    cut = post(http, PATH, messages=look, response_format=NAMED, **GREEDY, stop=['"count"'])["choices"][0]
    assert (cut["stop_reason"], cut["finish_reason"]) == ('"count"', "stop")
    assert '"shape"' in cut["message"]["content"] and "count" not in cut["message"]["content"]


def test_beams_have_the_shape_too(http: Any) -> None:
    for path, body in ((PATH, {"messages": TOLD}), ("/v1/completions", {"prompt": "There is"})):
        choices = post(http, path, **body, **NAMED_BEAMS)["choices"]
        texts = [one["message"]["content"] if path == PATH else one["text"] for one in choices]
        assert len(set(texts)) == 3 and all(map(fits, texts))


def test_the_other_routes(http: Any) -> None:
    for fields, right in (
        WAYS[name] for name in ("json_schema", "guided_json", "regex", "choice", "structured_outputs")
    ):
        body = {"prompt": ["Once", "There is"], "max_tokens": 60, "temperature": 0, **fields}
        texts = [one["text"] for one in post(http, "/v1/completions", **body)["choices"]]
        assert len(texts) == 2 and all(map(right, texts))
        streamed = joined(events(http, "/v1/completions", **body))
        assert [streamed[index]["text"] for index in range(2)] == texts
    made = post(http, "/generate", prompt="Say", structured_outputs={"choice": [" yes", " no"]}, temperature=0)
    assert made["text"][0] in ("Say yes", "Say no")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another type": ({"response_format": {"type": "yaml"}}, "response_format", "type is one of text, json_object"),
    "no type": ({"response_format": {}}, "response_format", "type is one of"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format",
        "json_schema.schema must be a JSON schema",
    ),
    "no json_schema": (
        {"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object",
    ),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format",
        "json_schema.name",
    ),
    "a name with spaces": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "response_format",
        "json_schema.name",
    ),
    "an unknown key": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "shape": 1}}},
        "response_format", "no 'shape'",
    ),
    "strict as a text": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}},
        "response_format", "strict must be true or false",
    ),
    "a schema that is none": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wizard"}}}},
        "response_format", "wizard",
    ),
    "two shapes": ({"guided_regex": "a", "response_format": NAMED}, "guided_regex", "response_format says already"),
    "two of vLLM's": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex says already"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
    "none in one": ({"structured_outputs": {}}, "structured_outputs", "none is given"),
    "an unknown shape": ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "there is no 'yaml'"),
    "a regex that is no text": ({"structured_outputs": {"regex": {}}}, "structured_outputs", "a text, not dict"),
    "a regex that is 0": ({"structured_outputs": {"regex": 0, "json": {}}}, "structured_outputs", "a text, not int"),
    "spaces that are no text": (
        {"structured_outputs": {"json": {}, "whitespace_pattern": [1]}}, "structured_outputs", "a text, not list",
    ),
    "a switch that is a text": (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}}, "structured_outputs", "true or false",
    ),
    "a choice that is 0": ({"structured_outputs": {"choice": 0, "json": {}}}, "structured_outputs", "list of texts"),
    "a regex that is none": ({"guided_regex": "[0-9"}, "guided_regex", "[0-9"),
    "a grammar that is none": ({"guided_grammar": "this is no grammar"}, "guided_grammar", ""),
    "a schema as a text that is no JSON": ({"guided_json": "{"}, "guided_json", ""),
    "a keyword that is not enforced": (
        {"guided_json": {"type": "object", "unevaluatedProperties": {"$dynamicRef": "#a"}}}, "guided_json", "",
    ),
    "spaces for no JSON": (
        {"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern", "for answers in JSON",
    ),
    "spaces alone": ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "for answers in JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_what_is_no_shape_is_refused_by_its_field(http: Any, name: str, path: str) -> None:
    fields, param, said = REFUSED[name]
    body = {"messages": WHO} if path == PATH else {"prompt": "a"}
    for stream in (False, True):
        error = refusal(http, path, **body, **fields, stream=stream)
        assert error["param"] == param and said in error["message"], error
        assert error["message"].startswith(f"{param}: ")


def test_a_schema_that_is_too_deep_is_refused_and_nothing_else_suffers(http: Any) -> None:
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    response = http.post(PATH, json={"messages": WHO, "guided_json": deep})
    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_json"
    response = http.post(PATH, content=f'{{"messages": [], "guided_json": {deep}}}'.encode())
    assert response.status_code == 400
    assert post(http, PATH, messages=WHO, **GREEDY)["choices"][0]["message"]["content"]
