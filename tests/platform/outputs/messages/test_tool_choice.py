"""The tools of a request, in OpenAI's forms of all ages, checked and made one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.platform.outputs.messages.tool_choice import (
    MAX_DEPTH,
    MAX_TOOLS,
    MAX_VALUES,
    Function,
    Tools,
    check_functions,
    check_tools,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}}
WAIT = {"type": "function", "function": {"name": "wait"}}
BOTH = (Function("look", "Look.", SCHEMA, True), Function("wait"))
NAMED = {"type": "function", "function": {"name": "wait"}}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("choice", "parallel", "want"),
    [
        (None, None, Tools(BOTH)),
        ("auto", True, Tools(BOTH)),
        ("none", False, Tools(BOTH, "none", parallel=False)),
        ("required", False, Tools(BOTH, "required", parallel=False)),
        (NAMED, None, Tools(BOTH, "named", "wait")),
        ({"type": "function", "name": "wait"}, None, Tools(BOTH, "named", "wait")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, None,
         Tools(BOTH, "auto", allowed=frozenset({"wait"}))),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}, None,
         Tools(BOTH, "required", allowed=frozenset({"look"}))),
    ],
)  # fmt: skip
def test_every_form_of_a_choice(choice: Any, parallel: bool | None, want: Tools) -> None:
    made = check_tools([LOOK, WAIT], choice, parallel)
    assert made == want
    assert made.forced == (want.choice in ("required", "named"))
    one = 1 if want.choice == "named" or parallel is False else None
    assert made.most == (0 if want.choice == "none" else one)
    called = {"none": [], "named": ["wait"]}.get(want.choice, sorted(want.allowed or {"look", "wait"}))
    assert [function.name for function in made.callable] == called


def test_without_tools() -> None:
    for none in (None, [], ()):
        assert check_tools(none) is check_tools(none, "auto") is check_tools(none, "none") is None
        for choice in ("required", NAMED):
            with pytest.raises(RequestError, match="tool_choice: there are no tools"):
                check_tools(none, choice)
    assert check_functions(None) is check_functions([], "none") is None
    with pytest.raises(RequestError, match="function_call: there are no functions"):
        check_functions([], {"name": "look"})


def test_what_came_before_tools() -> None:
    given = [LOOK["function"], WAIT["function"]]
    assert check_functions(given) == check_functions(given, "auto") == Tools(BOTH, "auto", parallel=False)
    assert check_functions(given, "none") == Tools(BOTH, "none", parallel=False)
    assert check_functions(given, {"name": "wait"}) == Tools(BOTH, "named", "wait", parallel=False)
    for bad, where in (("required", "function_call"), ({}, "function_call"), ({"name": "x"}, r"function_call\.name")):
        with pytest.raises(RequestError, match=where):
            check_functions(given, bad)


def test_what_templates_are_told() -> None:
    made = check_tools([LOOK, WAIT])
    assert made is not None
    assert made.as_tools() == [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert made.functions[1].schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert made.functions[0].schema == SCHEMA


def tool(**more: Any) -> Any:
    return {"type": "function", "function": {"name": "look", **more}}


@pytest.mark.parametrize(
    ("tools", "where"),
    [
        ("look", "tools: must be a list"),
        ({"name": "look"}, "tools: must be a list"),
        ([WAIT, "look"], r"tools\[1\]: must be an object"),
        ([{"type": "web_search"}], r"tools\[0\]\.type: 'web_search' is not served"),
        ([{"type": "function"}], r"tools\[0\]\.function: must be an object"),
        ([WAIT, tool(name="")], r"tools\[1\]\.function\.name"),
        ([tool(name="a b")], r"tools\[0\]\.function\.name"),
        ([tool(name="a" * 129)], r"tools\[0\]\.function\.name"),
        ([tool(name=5)], r"tools\[0\]\.function\.name"),
        ([tool(description=5)], r"tools\[0\]\.function\.description"),
        ([tool(description="a" * 70_000)], r"tools\[0\]\.function\.description"),
        ([tool(strict="yes")], r"tools\[0\]\.function\.strict"),
        ([tool(parameters=[])], r"tools\[0\]\.function\.parameters: must be a JSON schema"),
        ([tool(parameters={"type": "string"})], r"tools\[0\]\.function\.parameters\.type"),
        ([tool(parameters=nested(MAX_DEPTH + 1))], "nested more than"),
        ([tool(parameters=nested(20_000))], "nested more than"),
        ([tool(parameters={"enum": list(range(MAX_VALUES + 1))})], "more than 20000 values"),
        (
            [tool(name=f"f{place}", parameters={"enum": list(range(MAX_VALUES - 9))}) for place in range(6)],
            "tools: has more than 100000 values",
        ),
        ([WAIT, LOOK, WAIT], r"tools\[2\]: tools\[0\] is called 'wait' too"),
        ([tool(name=f"f{number}") for number in range(MAX_TOOLS + 1)], "the limit is 128"),
    ],
)
def test_malformed_tools_are_refused_by_their_place(tools: Any, where: str) -> None:
    with pytest.raises(RequestError, match=where):
        check_tools(tools)


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        ("any", "tool_choice: 'any'"),
        (5, "tool_choice: must be"),
        ({"type": "custom"}, r"tool_choice\.type"),
        ({"type": "function"}, r"tool_choice\.name"),
        ({"type": "function", "function": {"name": "see"}}, r"tool_choice\.function\.name: no tool is called 'see'"),
        ({"type": "allowed_tools", "mode": "none", "tools": [NAMED]}, r"tool_choice\.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, r"tool_choice\.allowed_tools\.tools"),
        ({"type": "allowed_tools", "tools": [5]}, r"tool_choice\.tools\[0\]"),
        ({"type": "allowed_tools", "tools": [{"name": "see"}]}, r"tool_choice\.tools\[0\]: no tool is called"),
    ],
)
def test_malformed_choices_are_refused(choice: Any, where: str) -> None:
    with pytest.raises(RequestError, match=where):
        check_tools([LOOK, WAIT], choice)
