"""Every field of a request does what the table in docs/server.md says: it is served, accepted, as it changes nothing,
refused, or unknown to a route.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatStreamParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionStreamParams

from quire.server.schemas import fields
from tests.server.api_answers import refusal, saved

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
HEADER = "| field | completions | chat | what it does |"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LEAST: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "chat": {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2},
}
HONOURED = {"completions": fields.COMPLETION_FIELDS, "chat": fields.CHAT_FIELDS}
REFUSED = {"completions": fields.REFUSED_IN_COMPLETIONS, "chat": fields.REFUSED_IN_CHAT}
OPENAI = {
    "completions": set(typing.get_type_hints(CompletionParams)) | set(typing.get_type_hints(CompletionStreamParams)),
    "chat": set(typing.get_type_hints(ChatParams)) | set(typing.get_type_hints(ChatStreamParams)),
}
KNOWN = sorted(set().union(*HONOURED.values(), *REFUSED.values(), fields.ACCEPTED))
HEADER_OF_IGNORED = "x-quire-ignored-fields"

# Of each field that is served: a value that is good, and one of another type. With what else the first needs.
BOTH: dict[str, tuple[Any, Any]] = {
    "model": ("quire-demo", 5),
    "best_of": (2, "2"),
    "echo": (True, "yes"),
    "frequency_penalty": (0.5, "much"),
    "presence_penalty": (-0.5, [0.5]),
    "logit_bias": ({"300": 5, "301": -0.5}, [300]),
    "max_tokens": (3, 3.5),
    "n": (2, True),
    "seed": (7, "7"),
    "stop": ([" a", " the"], 5),
    "stream_options": ({"include_usage": True}, {"include_usage": "yes"}),
    "stream": (True, 1),
    "temperature": (0.7, "warm"),
    "top_p": (0.9, "0.9"),
    "user": ("somebody", 5),
    "top_k": (5, 5.5),
    "min_p": (0.1, "0.1"),
    "repetition_penalty": (1.1, "1.1"),
    "use_beam_search": (True, "true"),
    "length_penalty": (0.5, "0.5"),
    "stop_token_ids": ([300, 301], ["300"]),
    "include_stop_str_in_output": (True, 1),
    "ignore_eos": (True, "true"),
    "min_tokens": (1, "1"),
    "skip_special_tokens": (False, 0),
    "spaces_between_special_tokens": (False, 0),
    "truncate_prompt_tokens": (3, "3"),
    "prompt_logprobs": (1, True),
    "allowed_token_ids": ([300, 301], [300.5]),
    "bad_words": ([" a"], " a"),
    "add_special_tokens": (False, "no"),
    "request_id": ("mine", 5),
    "safety_identifier": ("somebody", 5),
    "return_tokens_as_token_ids": (True, "yes"),
    "return_token_ids": (True, "yes"),
    "cache_salt": ("salt", 5),
    "vllm_xargs": ({}, ["a"]),
    "response_format": ({"type": "json_object"}, "json"),
    "structured_outputs": ({"regex": "a+"}, "a+"),
    "guided_json": ({"type": "object"}, ["object"]),
    "guided_regex": ("a+", ["a+"]),
    "guided_choice": (["a", "b"], "a"),
    "guided_grammar": ('start: "a" | "b"', 5),
    "guided_whitespace_pattern": (" ", 5),
    "structural_tag": (
        {"type": "structural_tag", "triggers": ["<a"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]},
        5,
    ),
}
SAMPLES: dict[str, dict[str, tuple[Any, Any]]] = {
    "completions": {
        "prompt": (["Once", "The"], {"text": "Once"}),
        "logprobs": (2, "2"),
        "prompt_embeds": (saved(torch.zeros(2, 192)), 5),
        **BOTH,
    },
    "chat": {
        "messages": ([{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}], "Who are you?"),
        "logprobs": (True, 2),
        "top_logprobs": (2, "2"),
        "max_completion_tokens": (2, "2"),
        "reasoning_effort": ("low", "much"),
        "add_generation_prompt": (False, "no"),
        "continue_final_message": (True, "yes"),
        "documents": ([{"title": "a", "text": "b"}], "a text"),
        "chat_template_kwargs": ({"style": "short"}, [1]),
        "mm_processor_kwargs": ({}, "small"),
        "include_reasoning": (False, "no"),
        "thinking_token_budget": (5, 5.5),
        "tools": ([{"type": "function", "function": {"name": "f", "parameters": {}}}], ["f"]),
        "tool_choice": ("none", 5),
        "parallel_tool_calls": (False, "no"),
        "functions": ([{"name": "f"}], {"name": "f"}),
        "function_call": ("none", 5),
        **BOTH,
    },
}
BESIDE: dict[str, dict[str, Any]] = {
    "length_penalty": {"use_beam_search": True},
    "top_logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_tokens": None},
    "stream_options": {"stream": True},
    "guided_whitespace_pattern": {"guided_json": {"type": "object"}},
    "tools": {"tool_choice": "none"},
    "functions": {"function_call": "none"},
}

# Of each field that is refused: a value that asks for something.
ASKING: dict[str, Any] = {
    "suffix": "the end",
    "top_a": 0.2,
    "typical_p": 0.9,
    "tfs": 0.9,
    "mirostat_mode": 2,
    "priority": 1,
    "logits_processors": ["a.b"],
    "kv_transfer_params": {"do_remote_prefill": True},
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "verbosity": "low",
    "web_search_options": {},
    "chat_template": "{{ messages }}",
    "media_io_kwargs": {"image": {}},
}


# Of each field that changes nothing: what clients send.
SENT: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "key",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "cache_control": {"type": "ephemeral"},
    "prediction": {"type": "content", "content": "x"},
    "guided_decoding_backend": "xgrammar",
    "usage": {"include": True},
    "session_id": "abc",
    "num_ctx": 4096,
    "keep_alive": "5m",
}


def status_of(route: str, field: str) -> str:
    """What fields.py says of it."""
    if field in fields.ACCEPTED:
        return "accepted"
    return "served" if field in HONOURED[route] else "refused" if field in REFUSED[route] else "-"


def table() -> dict[str, tuple[str, str]]:
    """docs/server.md's: field -> (completions, chat)."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    begin = lines.index(HEADER) + 2
    rows: dict[str, tuple[str, str]] = {}
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        name, completions, chat, what, *_ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        assert re.fullmatch(r"`[a-z_]+`", name), line
        assert name.strip("`") not in rows, f"{name} stands there twice"
        assert what, f"{name}: nothing is said of it"
        rows[name.strip("`")] = (completions, chat)
    return rows


def of(status: str) -> list[tuple[str, str]]:
    return [(route, field) for route in PATHS for field in KNOWN if status_of(route, field) == status]


# -- the table ---------------------------------------------------------------------------------------------------


def test_the_table_says_of_each_field_what_the_server_does() -> None:
    assert table() == {field: (status_of("completions", field), status_of("chat", field)) for field in KNOWN}


@pytest.mark.parametrize("route", PATHS)
def test_every_field_of_openais_is_known(route: str) -> None:
    assert OPENAI[route]
    for field in OPENAI[route]:
        assert field in HONOURED[route] or field in REFUSED[route] or field in fields.ACCEPTED, field
        assert table()[field][list(PATHS).index(route)] in ("served", "accepted", "refused")


@pytest.mark.parametrize("route", PATHS)
def test_no_field_is_both_served_and_refused(route: str) -> None:
    assert not set(HONOURED[route]) & set(REFUSED[route])
    assert not set(fields.ACCEPTED) & {*HONOURED[route], *REFUSED[route]}


@pytest.mark.parametrize("route", PATHS)
def test_samples_are_of_the_fields_that_there_are(route: str) -> None:
    assert set(SAMPLES[route]) == set(HONOURED[route])
    assert {field for refused in REFUSED.values() for field in refused} == set(ASKING)
    assert set(fields.ACCEPTED) == set(SENT)


# -- served --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "field"), of("served"))
def test_a_served_field_is_taken(http: Any, route: str, field: str) -> None:
    good, _ = SAMPLES[route][field]
    response = http.post(PATHS[route], json={**LEAST[route], **BESIDE.get(field, {}), field: good})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("route", "field"), of("served"))
def test_a_served_field_of_another_type_is_refused(http: Any, route: str, field: str) -> None:
    _, bad = SAMPLES[route][field]
    error = refusal(http, PATHS[route], **{**LEAST[route], **BESIDE.get(field, {}), field: bad})
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["message"].startswith(field)


@pytest.mark.parametrize(("route", "field"), of("served"))
def test_null_is_as_if_the_field_were_not_there(http: Any, route: str, field: str) -> None:
    body = {**LEAST[route], field: None}
    if field in ("prompt", "messages"):
        assert refusal(http, PATHS[route], **body)["param"] == field
    else:
        assert http.post(PATHS[route], json=body).status_code == 200


# -- accepted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "field"), of("accepted"))
def test_an_accepted_field_changes_nothing_and_is_named(http: Any, route: str, field: str) -> None:
    body = {**LEAST[route], "temperature": 0, "max_tokens": 5}
    without = http.post(PATHS[route], json=body)
    assert HEADER_OF_IGNORED not in without.headers
    for value in (SENT[field], "anything", 5, [None]):
        response = http.post(PATHS[route], json={**body, field: value})
        assert response.status_code == 200, response.text
        assert response.headers[HEADER_OF_IGNORED] == field
        assert response.json()["choices"] == without.json()["choices"]
    for value in (None, *fields.ACCEPTED[field].neutral):
        response = http.post(PATHS[route], json={**body, field: value})
        assert response.status_code == 200 and HEADER_OF_IGNORED not in response.headers


# -- refused and unknown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "field"), of("refused"))
def test_a_refused_field_says_why(http: Any, route: str, field: str) -> None:
    error = refusal(http, PATHS[route], **LEAST[route], **{field: ASKING[field]})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"] == f"{field}: {REFUSED[route][field].why}."


@pytest.mark.parametrize(("route", "field"), of("refused"))
def test_a_refused_field_may_ask_for_nothing(http: Any, route: str, field: str) -> None:
    for neutral in (None, *REFUSED[route][field].neutral):
        response = http.post(PATHS[route], json={**LEAST[route], field: neutral})
        assert response.status_code == 200, (neutral, response.text)


@pytest.mark.parametrize(("route", "field"), [*of("-"), *((route, "no_such_field") for route in PATHS)])
def test_an_unknown_field_is_refused(http: Any, route: str, field: str) -> None:
    for value in (1, None):
        error = refusal(http, PATHS[route], **LEAST[route], **{field: value})
        assert error["param"] == field
        assert "no such field" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ],
)
def test_the_other_routes_know_their_fields_too(http: Any, path: str, body: dict[str, Any]) -> None:
    assert refusal(http, path, **body, no_such_field=1)["param"] == "no_such_field"
    for field in body:
        assert refusal(http, path, **{**body, field: 5})["param"] == field
