"""Every format of tool calls: what models write comes back, however the text is cut."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.outputs.messages import plugins
from quire.platform.outputs.messages.message import Message, collect
from quire.platform.outputs.messages.tool_choice import Tools
from quire.platform.outputs.messages.tool_formats import FORMATS
from tests.platform.inputs.chats import tokenizer as byte_level
from tests.platform.outputs.messages import writing
from tests.platform.outputs.messages.reading import message_format, message_of, read, tools

SOME = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
MANY = settings(SOME, max_examples=150)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def offered(*names: str, schema: Any = None) -> Tools:
    parameters = {"type": "object", "properties": schema or {}}
    return tools(*({"type": "function", "function": {"name": name, "parameters": parameters}} for name in names))


ALL = offered("get_weather", "get_time", "a", "Look-at.it_2")


def said(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("name", "write"), [(name, write) for name, ways in writing.JSON_FORMATS.items() for write in ways]
)
@SOME
@given(calls=writing.calls_of(writing.TEXTS, writing.VALUES))
def test_formats_of_json(name: str, write: Any, calls: Any) -> None:
    """The arguments are the text that the model wrote."""
    message = message_of(message_format(name), write(calls), ALL)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        (called, writing.dumps(arguments)) for called, arguments in calls
    ]
    assert message.content is None


@pytest.mark.parametrize(
    ("name", "write"), [(name, write) for name, ways in writing.PYTHONIC_FORMATS.items() for write in ways]
)
@SOME
@given(calls=writing.calls_of(writing.WORDS, writing.VALUES))
def test_formats_of_python(name: str, write: Any, calls: Any) -> None:
    message = message_of(message_format(name), write(calls), ALL)
    assert said(message) == [(called, dict(arguments)) for called, arguments in calls]
    assert message.content is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*writing.JSON_FORMATS, *writing.PYTHONIC_FORMATS])
@MANY
@given(calls=writing.calls_of(writing.WORDS, writing.VALUES))
def test_formats_at_length(name: str, calls: Any) -> None:
    for write in (writing.JSON_FORMATS | writing.PYTHONIC_FORMATS)[name]:
        message = message_of(message_format(name), write(calls), ALL)
        assert said(message) == [(called, dict(arguments)) for called, arguments in calls]


ENDS = ("</parameter>", "</arg_value>")


@pytest.mark.parametrize(
    ("name", "write"), [(name, write) for name, ways in writing.XML_FORMATS.items() for write in ways]
)
@SOME
@given(arguments=st.dictionaries(writing.WORDS, writing.VALUES, max_size=4), free=st.booleans())
def test_formats_of_xml(name: str, write: Any, arguments: dict[str, Any], free: bool) -> None:
    """A text is all between its tags; what it is, the schema says. Without one, what is JSON is no text."""

    def fits(value: Any) -> bool:
        return not isinstance(value, str) or not any(end in value for end in ENDS)

    kept = {key: value for key, value in arguments.items() if fits(value) and fits(json.dumps(value))}
    if free:
        kept = {key: value for key, value in kept.items() if not isinstance(value, str)}
    schema = {key: {"type": "null" if value is None else TYPES[type(value)]} for key, value in kept.items()}
    given_tools = offered("look", schema=None if free else schema)
    message = message_of(message_format(name), write([("look", kept), ("look", {})]), given_tools)
    assert said(message) == [("look", kept), ("look", {})]
    assert message.content is None


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
@SOME
@given(
    text=st.lists(st.sampled_from(["a", " ", "\n", "{", "[", '"', "<", "(", "=", "<|", "|>", "x(", "é"])).map("".join)
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert message_of(message_format(name), "> " + text) == Message("> " + text)


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.name != "openai"])
@SOME
@given(data=st.data())
def test_any_text_of_its_notation_is_read_the_same_however_it_is_cut(name: str, data: Any) -> None:
    """Hostile texts: no cut changes what is made of them, and nothing is raised."""
    (found,) = (one for one in FORMATS if one.name == name)
    more = [
        *found.notation,
        "get_time",
        "a",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        ":",
        ",",
        "=",
        "\n",
        " ",
        "\\",
        "1",
    ]
    more += [
        '"name": "get_time"',
        '"arguments": ',
        "<function=",
        "</function>",
        "<parameter=",
        "<arg_key>",
        "</arg_key>",
    ]
    message_of(message_format(name), "".join(data.draw(st.lists(st.sampled_from(more), max_size=25))), ALL)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("pythonic", "[get_time(a=True, b=None, c=-1.5e3, d=(1, 2,), e={}, f=[],)]",
         {"a": True, "b": None, "c": -1500.0, "d": [1, 2], "e": {}, "f": []}),
        ("pythonic", "[ get_time ( a = true , b = {'x' : [ null ] , } ) ]", {"a": True, "b": {"x": [None]}}),
        ("pythonic", "[get_time(a='\\x41\\u00e9\\101\\q\\\n', b=\"\\ud83d\\udc4d\", c=0x10, d=1_000)]",
         {"a": "AéA\\q", "b": "👍", "c": 16, "d": 1000}),
        ("qwen3_coder", "<tool_call>\n<function=get_time>\n<parameter=a>\nTrue\n</parameter>\n<parameter=b>\nnone\n"
         "</parameter>\n<parameter=c>\nNaN\n</parameter>\n</function>\n</tool_call>",
         {"a": True, "b": None, "c": "NaN"}),
        ("qwen3_coder", "<tool_call><function=get_time><parameter=a>x</parameter></function>", {"a": "x"}),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n{}", {}),
        ("llama3_json", '{"type": "function", "name": "get_time", "parameters": {"a": 1}}', {"a": 1}),
        ("llama3_json", '\n\n{"name": "get_time", "parameters": {"a": 1}}\n', {"a": 1}),
    ],
)  # fmt: skip
def test_further_forms(name: str, text: str, arguments: Any) -> None:
    message = message_of(message_format(name), text)
    assert said(message) == [("get_time", arguments)] and message.content is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}'),
        ("llama3_json", '{"name": "get_time", "age": 3}'),
        ("llama3_json", '{"name": "get_time"}'),
        ("llama3_json", 'Call {"name": "get_time", "parameters": {}}'),
        ("json", '[{"name": "nobody", "arguments": {}}]'),
        ("json", '{"answer": {"name": "get_time", "arguments": {}}}'),
        ("pythonic", "[nobody(a=1)]"),
        ("pythonic", "[get_time(1)]"),
        ("pythonic", "[get_time]"),
        ("pythonic", "[]"),
        ("pythonic", "See [get_time(a=1)]"),
        ("phi4_mini", "import functools\nfunctools.reduce(x)"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
        ("glm45", "<tool_call>two words\n<arg_key>a</arg_key>"),
        ("mistral", "[TOOL_CALLS] nothing"),
    ],
)
def test_what_looks_like_a_call_and_is_none(name: str, text: str) -> None:
    assert message_of(message_format(name), text) == Message(text)


def test_a_function_that_there_is_not_is_a_call_where_tags_say_so() -> None:
    """Clients answer it, and the model learns; as an answer it would be nonsense."""
    text = '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'
    assert said(message_of(message_format("hermes"), text)) == [("nobody", {})]


def test_what_follows_a_bad_value_is_still_json() -> None:
    message = message_of(message_format("qwen3_coder"), "<tool_call>\n<function=a>\n<parameter=b>\n1\n</parameter>\nno")
    assert said(message) == [("a", {"b": 1})] and message.content == "no"


def test_special_tokens_that_are_no_notation_are_not_shown() -> None:
    specials = ["[TOOL_CALLS]", "[ARGS]", "</s>", "<pad>"]
    format = message_format("mistral_named", specials=specials)
    assert format.needs_special_tokens and not message_format("hermes", specials=specials).needs_special_tokens
    text = "Well<pad>.[TOOL_CALLS]get_time[ARGS]{}</s>"
    message = message_of(format, text)
    assert message.content == "Well." and said(message) == [("get_time", {})]
    assert message_of(format, text, keep_special_tokens=True).content == "Well<pad>.</s>"
    assert [len(call.id) for call in message.tool_calls] == [9]


def test_a_thousand_special_tokens_cost_little() -> None:
    specials = [f"<SPECIAL_{number}>" for number in range(1000)]
    format = message_format("mistral", specials=["[TOOL_CALLS]", *specials])
    begin = time.process_time()
    text = "<SPECIAL_1" + "<SPECIAL_99><" * 3_000 + "<a" * 3_000
    message = collect(read(format, list(text)))
    assert message.content == "<SPECIAL_1" + "<" * 3_000 + "<a" * 3_000
    for number in range(100):
        assert read(format, ["Yes."], request_id=str(number))
    assert time.process_time() - begin < 10


def test_characters_of_several_tokens_come_whole() -> None:
    """As the engine gives a text: token by token of a byte-level vocabulary, none of which is a whole emoji."""
    arguments = {"city": "👩‍👩‍👧 é 你好", "more": ["👍", {"ü": "</tool_call>"}]}
    text = writing.hermes([("get_weather", arguments), ("get_time", {})])
    ids = byte_level().encode("Ja 👍:\n" + text, add_special_tokens=False)
    detokenizer = Detokenizer(byte_level(), [], SamplingParams())
    parts, seen = [], 0
    for token in ids:
        detokenizer.append(token)
        parts.append(detokenizer.emittable(False)[seen:])
        seen += len(parts[-1])
    detokenizer.finish()
    parts.append(detokenizer.emittable(True)[seen:])
    deltas = read(message_format("hermes"), parts, ALL)
    assert said(collect(deltas)) == [("get_weather", arguments), ("get_time", {})]
    assert collect(deltas) == message_of(message_format("hermes"), "Ja 👍:\n" + text, ALL)
    assert len(parts) > len(text) / 2 and not any("\ufffd" in str(delta) for delta in deltas)


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
def test_names_lead_to_formats(one: Any) -> None:
    for name in (one.name, *one.aliases):
        found = plugins.tool_format(name)
        assert name in (found.name, *found.aliases)
        assert plugins.tool_format(name, lambda format: format is one) is one
    assert one.families and (one.begins or one.opens)
