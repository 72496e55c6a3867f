"""Inputs: items in every form that is served, what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.responses.errors import ApiError
from quire.server.schemas.responses.items import ItemReader
from quire.server.schemas.responses.messages import Conversation
from tests.server.api_answers import refusal
from tests.server.responses.helpers import GREEDY, PATH, WHO, respond, text_of

pytestmark = pytest.mark.usefixtures("one_thread")

USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "call_id": "c1", "name": "draw", "arguments": '{"shape": "star"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "drawn"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def reader() -> ItemReader:
    return ItemReader(lambda kind, place: f"{kind}_x_i{place}", {"msg_y_0": said("before")}.get)


def said(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_y_0", "type": "message", "role": "assistant", "status": "completed", "content": [part], **more}


def messages(*given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    conversation = Conversation(instructions)
    conversation.add(reader().items(list(given)), None)
    return conversation.messages


def called(*ids: str) -> list[dict[str, Any]]:
    function = {"name": "draw", "arguments": '{"shape": "star"}'}
    return [{"id": one, "type": "function", "function": function} for one in ids]


def test_a_text_is_a_users_message() -> None:
    (item,) = reader().items("Hello")
    assert item == {
        "id": "msg_x_i0",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hello"}],
    }


def test_easy_and_full_messages_are_the_same() -> None:
    full = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "status": "completed"}
    assert messages(USER) == messages(full) == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    easy = {"role": "assistant", "content": "b"}
    assert messages(USER, easy) == messages(USER, said("b")) == [*messages(USER), easy]


def test_an_answer_of_several_items_is_one_message() -> None:
    told = messages(USER, REASONING, said("I draw."), CALL, {**CALL, "call_id": "c2"}, OUTPUT, said("Done."), USER)
    assert told[1:4] == [
        {
            "role": "assistant",
            "content": "I draw.",
            "reasoning_content": "Hm.",
            "tool_calls": called("c1", "c2"),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "drawn"},
        {"role": "assistant", "content": "Done."},
    ]


def test_text_between_calls_is_kept() -> None:
    told = messages(USER, CALL, said("And "), {**CALL, "call_id": "c2"}, said("now."))
    assert told[1:] == [{"role": "assistant", "content": "And now.", "tool_calls": called("c1", "c2")}]


def test_two_answers_are_two_messages() -> None:
    assert [one["content"] for one in messages(USER, said("a"), said("b"))[1:]] == ["a", "b"]
    assert messages(USER, REASONING, USER)[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    again = messages(USER, REASONING, CALL, OUTPUT, REASONING, said("b"))
    assert [one.get("reasoning_content") for one in again] == [None, "Hm.", None, "Hm."]


def test_a_summary_stands_for_reasoning_that_is_not_shown() -> None:
    summary = [{"type": "summary_text", "text": text} for text in ("a", "b")]
    hidden = {"type": "reasoning", "summary": summary, "encrypted_content": "xyz"}
    assert messages(hidden, said("c"))[0]["reasoning_content"] == "a\n\nb"
    one = reader()
    one.items([hidden])
    assert one.ignored_fields == {"input[].encrypted_content"}


def test_refusals_references_and_outputs_of_parts() -> None:
    refused = said("", content=[{"type": "refusal", "refusal": "No."}])
    assert messages(USER, refused)[1]["content"] == "No."
    for reference in ({"type": "item_reference", "id": "msg_y_0"}, {"id": "msg_y_0"}):
        assert messages(USER, reference)[1] == {"role": "assistant", "content": "before"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:,"}]
    assert messages(CALL, {**OUTPUT, "output": parts})[1]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "auto"}},
    ]


def test_instructions_come_first() -> None:
    assert messages(USER, instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_errors_about_messages_name_the_item() -> None:
    conversation = Conversation("Be brief.")
    conversation.add(reader().items([USER, CALL, OUTPUT, USER]), "previous_response_id")
    conversation.add(reader().items([USER, said("a"), USER]), None)
    for message, want in (
        ("messages[0].content is odd.", "instructions.content is odd."),
        ("messages[2].content is odd.", "previous_response_id.content is odd."),
        ("messages[7].content[1] is odd.", "input[2].content[1] is odd."),
        ("messages has 0 entries.", "input has 0 entries."),
        ("messages: are too long.", "input: are too long."),
    ):
        error = conversation.about(ApiError(400, message, "messages"))
        assert (error.message, error.param) == (want, "input")


FAULTS: list[tuple[Any, str]] = [
    ([], "input"),
    ([{}], "input[0].type"),
    ([{"type": "wizard"}], "input[0].type: items 'wizard' are not served"),
    ([{"type": ["message"]}], "input[0].type"),
    ([{"type": "computer_call", "id": "a"}], "input[0].type: items 'computer_call' are not served"),
    ([{"type": "custom_tool_call", "call_id": "a", "name": "b", "input": "c"}], "input[0].type"),
    ([USER, {"role": "tool", "content": "a"}], "input[1].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": {"type": "input_text"}}], "input[0].content"),
    ([{"role": "user", "content": ["a"]}], "input[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text", "text": 5}]}], "input[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "input[0].content[0].type: 'text' is not served"),
    ([{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}], "input[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio", "data": "a"}]}], "input[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}], "input[0].content[0].file_id"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
    (
        [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "original"}]}],
        "input[0].content[0].detail",
    ),
    ([{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}], "input[0].content[0].type"),
    ([{**CALL, "arguments": {}}], "input[0].arguments"),
    ([{**CALL, "call_id": ""}], "input[0].call_id"),
    ([{**CALL, "name": "x" * 300}], "input[0].name"),
    ([OUTPUT], "input[0].call_id: there is no function_call 'c1' before it"),
    ([USER, OUTPUT, CALL], "input[1].call_id"),
    ([CALL, {**OUTPUT, "output": 5}], "input[1].output"),
    ([CALL, {**OUTPUT, "output": [{"type": "output_text", "text": "a"}]}], "input[1].output[0].type"),
    ([{"type": "reasoning", "summary": [{"type": "text", "text": "a"}]}], "input[0].summary[0].type"),
    ([{"type": "reasoning", "summary": "a"}], "input[0].summary"),
    ([{**USER, "status": "odd", "type": "message"}], "input[0].status"),
    ([{"type": "item_reference", "id": "msg_y_0"}], "input: this server keeps no items"),
    ([USER] * 10_001, "input: has 10001 items"),
    ([{"role": "user", "content": [{"type": "input_text", "text": ""}] * 10_001}], "input: has more than 10000 parts"),
    ([{"role": "user", "content": "long " * 2_000_000}], "This model's maximum context length is"),
    (None, "input: is missing"),
    (5, "input"),
    (["a"], "input: "),
]


@pytest.mark.parametrize(("given", "begins"), FAULTS, ids=[f"{n}" for n in range(len(FAULTS))])
def test_what_is_no_item_or_is_not_served(http: Any, given: Any, begins: str) -> None:
    error = refusal(http, PATH, input=given, max_output_tokens=2)
    assert error["param"] == "input" and error["message"].startswith(begins), error


def test_further_keys_are_named(http: Any) -> None:
    part = {"type": "input_text", "text": WHO, "cache": 1}
    answer = http.post(PATH, json={"input": [{"role": "user", "content": [part], "name": "ann"}], **GREEDY})
    assert answer.headers["x-quire-ignored-fields"] == "input[].content[].cache, input[].name"
    assert text_of(answer.json()) == text_of(respond(http, input=WHO, **GREEDY))
