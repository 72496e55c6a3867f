"""Calls of tools as models of each format write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Calls = Sequence[tuple[str, Mapping[str, Any]]]
_TAGS = (
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    '"}',
    "\\",
    "]",
    "</parameter>",
    "<|call|>",
    "<｜tool▁call▁end｜>",
    "\n",
)

NAMES = st.sampled_from(["get_weather", "get_time", "a", "Look-at.it_2"])
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.lists(st.sampled_from([*_TAGS, "é", "👍", "'", '"', " "]), max_size=5).map("".join),
)
NUMBERS = st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
WORDS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)


def calls_of(keys: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(NAMES, st.dictionaries(keys, values, max_size=4)), min_size=1, max_size=3)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(name: str, arguments: Any, key: str = "arguments") -> str:
    return f'{{"name": {dumps(name)}, "{key}": {dumps(arguments)}}}'


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def listed(begin: str, end: str = "") -> Callable[[Calls], str]:
    return lambda calls: f"{begin}[{', '.join(_object(*call) for call in calls)}]{end}"


def llama(begin: str = "") -> Callable[[Calls], str]:
    return lambda calls: begin + "; ".join(_object(*call, key="parameters") for call in calls)


def pythonic(begin: str = "", end: str = "") -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        made = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
        return f"{begin}[{', '.join(made)}]{end}"

    return write


def mistral(mark: str) -> Callable[[Calls], str]:
    return lambda calls: "".join(f"[TOOL_CALLS]{name}{mark}{dumps(given)}" for name, given in calls)


def deepseek(before: str, after: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        made = (f"<｜tool▁call▁begin｜>{before.format(name)}{dumps(given)}{after}" for name, given in calls)
        return f"<｜tool▁calls▁begin｜>{''.join(made)}<｜tool▁calls▁end｜>"

    return write


def kimi(calls: Calls) -> str:
    made = (
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
        for place, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls: Calls) -> str:
    def one(name: str, given: Mapping[str, Any]) -> str:
        body = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(between: str) -> Callable[[Calls], str]:
    def one(name: str, given: Mapping[str, Any]) -> str:
        body = "".join(
            f"<arg_key>{key}</arg_key>{between}<arg_value>{_raw(value)}</arg_value>{between}"
            for key, value in given.items()
        )
        return f"<tool_call>{name}{between}{body}</tool_call>"

    return lambda calls: "\n".join(one(*call) for call in calls)


# name of the format -> how calls are written
JSON_FORMATS: dict[str, list[Callable[[Calls], str]]] = {
    "hermes": [hermes],
    "granite": [listed("<|tool_call|>"), listed("<tool_call> ")],
    "phi4_mini": [listed("<|tool_call|>", "<|/tool_call|>"), listed("functools")],
    "phi4_mini_json": [listed("functools"), listed("<|tool_call|>")],
    "mistral": [
        listed("[TOOL_CALLS] "),
        listed("[TOOL_CALLS]"),
        mistral("[ARGS]"),
        mistral("[CALL_ID]abcdEF123[ARGS]"),
    ],
    "mistral_named": [mistral("[ARGS]")],
    "mistral_identified": [mistral("[CALL_ID]abcdEF123[ARGS]")],
    "llama3_json": [llama(), llama("<|python_tag|>")],
    "json": [llama(), listed("")],
    "deepseek_v3": [deepseek("function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>\n")],
    "deepseek_v31": [deepseek("{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>")],
    "kimi_k2": [kimi],
}
PYTHONIC_FORMATS: dict[str, list[Callable[[Calls], str]]] = {
    "pythonic": [pythonic()],
    "llama4_pythonic": [pythonic(), pythonic("<|python_start|>", "<|python_end|>")],
}
XML_FORMATS: dict[str, list[Callable[[Calls], str]]] = {
    "qwen3_coder": [qwen3_coder],
    "glm45": [glm("\n"), glm("")],
    "glm47": [glm("")],
}
