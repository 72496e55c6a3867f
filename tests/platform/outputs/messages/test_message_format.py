"""A model's formats: found by its chat template or by name, and what tokens they let follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

from quire.errors import QuireError, RequestError
from quire.platform.outputs.messages.harmony import HARMONY
from quire.platform.outputs.messages.message_format import REASONING_FORMATS, MessageFormat, formats_of
from quire.platform.outputs.messages.tool_formats import FORMATS
from quire.platform.sampling.structured.params import StructuredOutputsParams
from tests.platform.outputs.messages.reading import TIME, WEATHER, message_format, message_of, tools

# Of the published templates, what says how calls are written.
QWEN = (
    "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
THINKS = "{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}"
TEMPLATES = {
    "hermes": QWEN,
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>",
    "llama3_json": 'format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "llama4_pythonic": (
        "<|header_start|>system Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]"
    ),
    "mistral": "{{- '[AVAILABLE_TOOLS] [' }}{{- '[TOOL_CALLS] [' }}",
    "mistral_named": "{{- '[AVAILABLE_TOOLS]' }}{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "mistral_identified": "{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}",
    "granite": "<|start_of_role|>respond with <|tool_call|> followed by a JSON list of tools used.",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '```json'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "phi4_mini_json": 'as functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
    "phi4_mini": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "openai": "<|start|>assistant<|channel|>analysis<|message|>",
}


def model(template: Any, *specials: str) -> Any:
    added = {number: AddedToken(text, special=True) for number, text in enumerate(specials)}
    return SimpleNamespace(chat_template=template, added_tokens_decoder=added, all_special_tokens=[])


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items(), ids=TEMPLATES)
def test_found_by_the_template(name: str, template: str) -> None:
    found = formats_of(model("{{ bos_token }}" + template))
    assert found.tools is not None and found.tools.name == name
    assert formats_of(model("nothing"), template).tools is found.tools
    assert formats_of(model({"default": "nothing", "tool_use": template})).tools is found.tools
    assert formats_of(model({"default": "nothing", "tool_use": template}), "tool_use").tools is found.tools
    by_name = formats_of(model(template), tool_parser=name)
    assert by_name.tools is found.tools
    for alias in found.tools.aliases:  # of several of one name, the one whose signs the template has
        assert formats_of(model(template), tool_parser=alias).tools is found.tools


@pytest.mark.parametrize(
    "template", [None, "", "{{ tools | tojson }}", "Write <tool_call>.", QWEN + TEMPLATES["llama3_json"]]
)
def test_what_is_not_certain_is_not_found(template: Any) -> None:
    found = formats_of(model(template))
    assert found == MessageFormat() and not found.needs_special_tokens
    with pytest.raises(RequestError, match="--tool-call-parser"):
        found.parser(tools())
    with pytest.raises(RequestError, match="hermes, json"):
        found.constraint(tools())


def test_reasoning_is_found_by_the_template() -> None:
    found = formats_of(model(QWEN + THINKS))
    assert found.reasoning is not None and found.tools is not None
    assert (found.tools.name, found.reasoning.name) == ("hermes", "think")
    assert formats_of(model(QWEN)).reasoning is None
    for one in REASONING_FORMATS:
        for name in (one.name, *one.aliases):
            got = formats_of(model(QWEN), reasoning_parser=name, tool_parser="openai" if one is HARMONY else None)
            assert got.reasoning is not None and name in (got.reasoning.name, *got.reasoning.aliases)


def test_harmony_is_one_notation() -> None:
    for found in (
        formats_of(model(TEMPLATES["openai"])),
        formats_of(model(""), tool_parser="openai"),
        formats_of(model(""), reasoning_parser="openai_gptoss"),
    ):
        assert found.tools is not None and found.reasoning is not None
        assert (found.tools.name, found.reasoning.name) == ("openai", "openai_gptoss")
    for given in ({"tool_parser": "hermes"}, {"reasoning_parser": "qwen3"}):
        with pytest.raises(QuireError, match="one notation"):
            formats_of(model(TEMPLATES["openai"]), **given)


def test_what_is_not_to_be_told_apart() -> None:
    neither = formats_of(model(QWEN + THINKS), tool_parser="none", reasoning_parser="none")
    assert neither == MessageFormat()
    assert formats_of(model(TEMPLATES["openai"]), reasoning_parser="none") == MessageFormat()
    thoughts = formats_of(model(TEMPLATES["openai"]), tool_parser="none")
    assert thoughts.tools is None and thoughts.reasoning is HARMONY


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(QuireError, match=r"tool_call_parser: 'nobody' .*deepseek_v3.*hermes.*qwen3_coder"):
        formats_of(model(""), tool_parser="nobody")
    with pytest.raises(QuireError, match=r"reasoning_parser: 'nobody' .*deepseek_r1.*openai_gptoss"):
        formats_of(model(""), reasoning_parser="nobody")
    for target in ("no_such_module:FORMAT", "json:", "json:loads", ":x"):
        with pytest.raises(QuireError, match="tool_call_parser"):
            formats_of(model(""), tool_parser=target)


# What tokens may follow.

PLACE = {"place": "tools[0].function.parameters"}
FREE = {"type": "json_schema", "json_schema": {"type": "object"}, **PLACE}
SCHEMA = {"type": "json_schema", "json_schema": WEATHER["function"]["parameters"], **PLACE}
STRICT_FALSE = {"type": "function", "function": {**WEATHER["function"], "strict": False}}


def structure(format: MessageFormat, *args: Any, **options: Any) -> Any:
    made = format.constraint(*args, **options)
    assert made is not None and made.structural_tag is not None
    return made.structural_tag["format"]


def tag(name: str, content: Any = SCHEMA) -> Any:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


def test_auto_shapes_calls_from_their_tag_on() -> None:
    hermes = message_format("hermes")
    want = {
        "type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag("get_weather")], "at_least_one": False,
        "stop_after_first": False,
    }  # fmt: skip
    assert structure(hermes, tools(WEATHER)) == want
    assert structure(hermes, tools(WEATHER, parallel=False)) == {**want, "stop_after_first": True}
    assert structure(hermes, tools(STRICT_FALSE)) == {**want, "tags": [tag("get_weather", FREE)]}
    assert hermes.constraint(tools(WEATHER), strict=False) is None
    assert hermes.constraint(tools(WEATHER, choice="none")) is None and hermes.constraint(None) is None


def test_required_and_named_are_calls_alone() -> None:
    hermes = message_format("hermes")
    every = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "stop_after_first": False}
    made = structure(hermes, tools(STRICT_FALSE, TIME, choice="required"), strict=False)
    assert {**made, "tags": None} == {**every, "tags": None}
    assert made["tags"][0] == tag("get_weather")  # what is asked for has its schema's shape
    assert made["tags"][1]["content"]["json_schema"] == TIME["function"]["parameters"]
    named = {"type": "function", "function": {"name": "get_weather"}}
    want = {**every, "stop_after_first": True, "tags": [tag("get_weather")]}
    assert structure(hermes, tools(choice=named)) == want
    assert structure(hermes, tools(choice={"type": "function", "name": "get_weather"})) == want
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    assert structure(hermes, tools(choice=allowed)) == {**want, "stop_after_first": False}


def test_an_answer_s_own_shape_and_calls() -> None:
    hermes, thinks = message_format("hermes"), message_format("hermes", "qwen3")
    answer = StructuredOutputsParams(regex="a+", whitespace_pattern=" ")
    assert hermes.constraint(None, answer) == answer and hermes.constraint(tools(choice="none"), answer) == answer
    made = hermes.constraint(tools(WEATHER), answer)
    assert made is not None and made.whitespace_pattern == " "
    both = structure(hermes, tools(WEATHER), answer)
    assert [one["type"] for one in both["elements"]] == ["tags_with_separator", "regex"] and both["type"] == "or"
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        with pytest.raises(RequestError, match="structured_outputs: tool_choice asks for calls alone"):
            hermes.constraint(tools(WEATHER, choice=choice), answer)
    # behind the reasoning
    behind = thinks.constraint(None, answer, True)
    assert behind == StructuredOutputsParams(regex="a+", whitespace_pattern=" ", after="</think>")
    assert thinks.constraint(None, answer, False) == answer
    first, second = structure(thinks, None, answer, None)["elements"]
    assert second == {"type": "regex", "pattern": "a+"} and first["elements"][-1] == second
    assert first["elements"][0]["begin"] == "<think>" and first["elements"][0]["end"] == "</think>"
    called = thinks.constraint(tools(WEATHER), None, True)
    assert called is not None and called.after == "</think>"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"json": {"type": "object"}}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ({"grammar": "root ::= 'a'"}, {"type": "grammar", "grammar": "root ::= 'a'"}),
        ({"choice": ["a"]}, {"type": "or", "elements": [{"type": "const_string", "value": "a"}]}),
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}, {"type": "any_text"}),
        (
            {"structural_tag": {"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}},
            {"type": "triggered_tags", "triggers": ["<"], "tags": [{"type": "tag", "begin": "<",
             "content": {"type": "json_schema", "json_schema": {}}, "end": ">"}]},
        ),
    ],
)  # fmt: skip
def test_every_shape_of_an_answer_has_a_structure(given: Any, want: Any) -> None:
    both = structure(message_format("hermes"), tools(), StructuredOutputsParams(**given))
    assert both["elements"][1] == want


@pytest.mark.parametrize("tag", ["no JSON", "[]", {"structures": 5, "triggers": ["<"]}, {"structures": [{"a": 1}]}])
def test_a_tag_that_is_none_is_refused_beside_calls(tag: Any) -> None:
    with pytest.raises(RequestError, match="structural_tag"):
        structure(message_format("hermes"), tools(), StructuredOutputsParams(structural_tag=tag))


def test_calls_that_are_asked_for_need_no_known_format() -> None:
    unknown = MessageFormat()
    made = structure(unknown, tools(WEATHER, choice="required"))
    assert (made["begin"], made["end"]) == ("[", "]")
    one = structure(unknown, tools(WEATHER, choice={"type": "function", "function": {"name": "get_weather"}}))
    assert one["tags"][0]["begin"] == '{"name": "get_weather", "arguments": '
    message = message_of(unknown, '[{"name": "get_weather", "arguments": {}}]', tools(choice="required"))
    assert [call.name for call in message.tool_calls] == ["get_weather"]


def _texts(made: Any, function: str) -> str:
    """A text that a structure lets through: one call of a function without arguments."""
    kind = made["type"]
    if kind == "tag":
        return str(made["begin"]) + _texts(made["content"], function) + str(made["end"])
    if kind in ("tags_with_separator", "triggered_tags"):
        return _texts(made["tags"][0], function)
    if kind == "sequence":
        return "".join(_texts(one, function) for one in made["elements"])
    if kind == "or":
        return _texts(made["elements"][-1], function)
    if kind == "regex":
        return {r":[0-9]+": ":0", "[a-zA-Z0-9]{9}": "abcdEF123", r"\s*": ""}[made["pattern"]]
    if kind == "const_string":
        return str(made["value"])
    return {"json_schema": "{}", "xml_parameters": "", "pythonic_arguments": ""}[kind]


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
def test_what_a_structure_lets_through_is_read_as_a_call(one: Any, choice: str, parallel: bool) -> None:
    format = message_format(one.name, one.together or None)
    asked = tools(TIME, choice=choice, parallel=parallel)
    if choice == "auto" and one.name in ("llama3_json", "pythonic", "json"):
        assert format.constraint(asked) is None
        return
    made = structure(format, asked)
    message = message_of(format, _texts(made, "get_time"), asked)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("get_time", "{}")]
    assert message.content in (None, "")
    if choice == "auto":
        assert all(tag["begin"].startswith(tuple(made["triggers"])) for tag in made["tags"])


def test_special_tokens() -> None:
    found = formats_of(model(TEMPLATES["mistral_named"], "[TOOL_CALLS]", "</s>"))
    assert found.needs_special_tokens
    assert not formats_of(model(QWEN, "</s>")).needs_special_tokens
