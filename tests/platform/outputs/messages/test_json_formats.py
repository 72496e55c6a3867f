"""Calls that are JSON objects between tags."""

from __future__ import annotations

import json
import time

import pytest

from quire.platform.outputs.messages.message import ArgumentsDelta, CallBegin, ContentDelta, Message
from quire.platform.outputs.messages.message_format import MessageFormat
from tests.platform.outputs.messages.reading import message_format, message_of, read, tools

HERMES = message_format("hermes")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ā \\"<tool_call>\\" </tool_call>"}}\n</tool_call>'
ARGUMENTS = '{"city": "Ā \\"<tool_call>\\" </tool_call>"}'


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


def test_a_call() -> None:
    message = message_of(HERMES, CALL, request_id="r")
    assert calls(message) == [("get_weather", ARGUMENTS)] and message.content is None
    assert json.loads(ARGUMENTS)["city"] == 'Ā "<tool_call>" </tool_call>'


def test_content_before_between_and_behind_calls_is_kept() -> None:
    message = message_of(HERMES, f" Let me see. \n{CALL}\nAnd:\n{CALL}\n{CALL} Done. ")
    assert calls(message) == [("get_weather", ARGUMENTS)] * 3
    assert message.content == " Let me see. \n\nAnd:\n\n Done."


def test_deltas_are_the_name_and_then_arguments_as_they_come() -> None:
    deltas = read(
        HERMES, ["Hm", "m <tool", '_call>\n{"name": "get_', 'time", "arguments": {"a"', ": 1", "}}\n</to", "ol_call>"]
    )
    begin = deltas[2]
    assert isinstance(begin, CallBegin) and begin.name == "get_time"
    assert deltas[:2] == [ContentDelta("Hm"), ContentDelta("m")]
    assert deltas[3:] == [ArgumentsDelta(0, '{"a"'), ArgumentsDelta(0, ": 1"), ArgumentsDelta(0, "}")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": [1, {}]}, "name": "get_time"}', '{"a": [1, {}]}'),
        ('{"id": {"x": "}"}, "name": "get_time", "type": null, "arguments": {"a": 1} , "more": [1, "]"]}', '{"a": 1}'),
        ('{"name": "get_time"}', "{}"),
        ('{"name": "get_time", "arguments": null}', "{}"),
        ('{"name": "get_time", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}'),
        ('{"name": "get_\\u0074ime", "parameters": {}}', "{}"),
        ('{ "name" : "get_time" , "arguments" : { "a" : 1 } }', '{ "a" : 1 }'),
    ],
)
@pytest.mark.parametrize("ending", ["\n</tool_call>", "", "\n"])
def test_forms_of_a_call(text: str, arguments: str, ending: str) -> None:
    message = message_of(HERMES, f"<tool_call>{text}{ending}")
    assert calls(message) == [("get_time", arguments)] and message.content is None


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call",
        "a < b <tool_cal l> <tool_call>",
        "</tool_call> by itself",
        "<tool_call>\nnothing of the kind\n</tool_call>",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_ti',
        '<tool_call>\n{"name": "get_time", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": "b"}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": "b',
        '<tool_call>\n{"name" "get_time"}',
        '<tool_call>\n{"name": "' + "x" * 300 + '"}',
        "  \n",
        "",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert message_of(HERMES, text) == Message(text)


def test_a_call_that_ends_early_keeps_what_has_come() -> None:
    message = message_of(HERMES, '<tool_call>\n{"name": "get_time", "arguments": {"a": "b\\')
    assert calls(message) == [("get_time", '{"a": "b')]


def test_a_call_behind_one_that_is_none() -> None:
    message = message_of(HERMES, f"<tool_call>{CALL}")
    assert calls(message) == [("get_weather", ARGUMENTS)] and message.content == "<tool_call>"


def test_a_closing_tag_is_notation_behind_a_call_alone() -> None:
    assert message_of(HERMES, f"{CALL}</tool_call>").content == "</tool_call>"


def test_no_more_calls_than_are_asked_for() -> None:
    message = message_of(HERMES, f"{CALL}\n{CALL}", tools(parallel=False))
    assert calls(message) == [("get_weather", ARGUMENTS)]


def test_where_nothing_is_to_be_called_calls_are_left_out_and_without_a_format_they_are_content() -> None:
    assert message_of(MessageFormat(), CALL, tools(choice="none")) == Message(CALL)
    assert message_of(HERMES, f"Well. {CALL}", tools(choice="none")) == Message("Well.")


def test_ids_are_the_same_each_time_and_of_one_call_alone() -> None:
    ids = [
        [call.id for call in message_of(HERMES, CALL + CALL, request_id=name, choice=choice).tool_calls]
        for name, choice in (("a", 0), ("a", 0), ("a", 1), ("b", 0))
    ]
    assert ids[0] == ids[1] and len({one for each in ids for one in each}) == 6
    assert all(one.startswith("chatcmpl-tool-") and len(one) == 46 for one in ids[0])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_time", "arguments": {"a": "' + "\\n<" * 30_000 + '"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": ' + '{"a":' * 30_000,
        '<tool_call>\n{"arguments": ' + "[" * 50_000,
        '<tool_call>\n{"name": "get_time"' + " " * 50_000,
        "<tool_call>" * 10_000,
        "<" * 50_000,
        " \n" * 30_000,
    ],
)
def test_the_cost_of_a_character_does_not_grow(text: str) -> None:
    """A parser that reads its text again at each part would take minutes."""
    begin = time.process_time()
    read(HERMES, list(text))
    assert time.process_time() - begin < 5
