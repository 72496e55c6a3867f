"""The tools of a request, checked, in one form: OpenAI's `tools` and `tool_choice`, and what came before them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import RequestError

MAX_TOOLS = 128  # OpenAI's limit
MAX_DESCRIPTION = 1 << 16  # characters
MAX_VALUES = 20_000  # of one function's parameters, nested ones included
MAX_ALL_VALUES = 100_000  # of all functions
MAX_DEPTH = 64

# Why an answer cannot have a shape of its own, too.
CALLS_ALONE = "asks for calls alone, so that there is no content to have this shape; leave one of the two out."

_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")
_WORDS = ("none", "auto", "required")

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call. parameters: a JSON schema of an object, None for a function without any.

    strict: what the request said of it, if it did. False frees the arguments of calls of the model's own accord.
    place: of `parameters` in the request, as errors name it.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    place: str = field(default="", compare=False)

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of the arguments."""
        if self.parameters:
            return self.parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}

    def as_tool(self) -> dict[str, Any]:
        """As OpenAI's `tools` has it, which is what chat templates take; `strict` is no affair of theirs."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """functions: that the template is told of.  choice: none: nothing is called; auto: the model may call; required:
    it must; named: it calls `named`.  parallel: whether an answer may have more than one call.

    allowed: names of the functions that may be called, of `allowed_tools`; None for all.
    """

    functions: tuple[Function, ...]
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = field(default=None)

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that the answer may call."""
        if self.choice == "none":
            return ()
        if self.choice == "named":
            return tuple(function for function in self.functions if function.name == self.named)
        return tuple(one for one in self.functions if self.allowed is None or one.name in self.allowed)

    @property
    def forced(self) -> bool:
        """Whether the answer is calls alone."""
        return self.choice in ("required", "named")

    @property
    def most(self) -> int | None:
        """How many calls an answer may have; None: any number."""
        if self.choice == "none":
            return 0
        return 1 if self.choice == "named" or not self.parallel else None

    def as_tools(self) -> list[dict[str, Any]]:
        """For chat templates."""
        return [function.as_tool() for function in self.functions]


def check_tools(tools: Any, tool_choice: Any = None, parallel: bool | None = None) -> Tools | None:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. None where there are no tools.

    tool_choice: "none", "auto", "required", {"type": "function", "function": {"name": ...}} or, as /v1/responses has
    it, {"type": "function", "name": ...}; or {"type": "allowed_tools", "allowed_tools": {"mode", "tools": [...]}}.

    Raises RequestError naming the field and the tool's place.
    """
    if tools is None or (isinstance(tools, Sequence) and not isinstance(tools, (str, bytes)) and not tools):
        if tool_choice in (None, "none", "auto"):
            return None
        raise RequestError("tool_choice: there are no tools to choose from; give them in tools.")
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError("tools: must be a list of {'type': 'function', 'function': {'name': ..., ...}}.")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} are given, and the limit is {MAX_TOOLS}.")
    _check_size("tools", tools, MAX_ALL_VALUES, MAX_DEPTH + 4)
    functions = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    _check_names("tools", functions)
    return _chosen(functions, tool_choice, True if parallel is None else parallel)


def check_functions(functions: Any, function_call: Any = None) -> Tools | None:
    """The same of OpenAI's `functions` and `function_call`, which came before tools: at most one call an answer."""
    if functions is None or functions == []:
        if function_call in (None, "none", "auto"):
            return None
        raise RequestError("function_call: there are no functions to choose from; give them in functions.")
    if not isinstance(functions, Sequence) or isinstance(functions, (str, bytes)):
        raise RequestError("functions: must be a list of {'name': ..., 'parameters': {...}}.")
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"functions: {len(functions)} are given, and the limit is {MAX_TOOLS}.")
    _check_size("functions", functions, MAX_ALL_VALUES, MAX_DEPTH + 3)
    made = tuple(_function(f"functions[{index}]", function) for index, function in enumerate(functions))
    _check_names("functions", made)
    if function_call in (None, "auto", "none"):
        return Tools(made, function_call or "auto", parallel=False)
    name = function_call.get("name") if isinstance(function_call, Mapping) else None
    if not isinstance(name, str):
        raise RequestError("function_call: is 'none', 'auto' or {'name': ...}.")
    _check_known("function_call.name", name, made)
    return Tools(made, "named", name, parallel=False)


def _tool(where: str, tool: Any) -> Function:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where}: must be an object, {{'type': 'function', 'function': {{...}}}}.")
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{where}.type: {str(kind)[:40]!r} is not served; tools are functions that the client runs, of type "
            "'function'."
        )
    return _function(f"{where}.function", tool.get("function"))


def _function(where: str, given: Any) -> Function:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: must be an object with a name.")
    name, description = given.get("name"), given.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name: must have 1 to 128 letters, digits, underscores, dots and dashes.")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise RequestError(f"{where}.description: must be a text of at most {MAX_DESCRIPTION} characters.")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict: must be true or false.")
    place = f"{where}.parameters"
    return Function(name, description, _parameters(place, given.get("parameters")), strict, place)


def _parameters(where: str, given: Any) -> Mapping[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: must be a JSON schema of an object.")
    kind = given.get("type", "object")
    if kind != "object":
        raise RequestError(f"{where}.type: must be 'object': a function's arguments have names.")
    _check_size(where, given)
    return given


def _check_size(where: str, given: Any, most: int = MAX_VALUES, depth: int = MAX_DEPTH) -> None:
    """Bounded before anybody walks it."""
    level: list[Any] = [given]
    values = 0
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            values += len(held)
            if values > most:
                raise RequestError(f"{where}: has more than {most} values.")
            below.extend(held)
        if not below:
            return
        level = below
    raise RequestError(f"{where}: is nested more than {depth} deep.")


def _check_names(field_name: str, functions: Sequence[Function]) -> None:
    first: dict[str, int] = {}
    for index, function in enumerate(functions):
        if function.name in first:
            raise RequestError(
                f"{field_name}[{index}]: {field_name}[{first[function.name]}] is called {function.name!r} too; a call "
                "could not say which is meant."
            )
        first[function.name] = index


def _check_known(where: str, name: str, functions: Sequence[Function]) -> None:
    if all(function.name != name for function in functions):
        known = ", ".join(function.name for function in functions[:10])
        raise RequestError(f"{where}: no tool is called {name[:128]!r}; there are {known}.")


def _chosen(functions: tuple[Function, ...], choice: Any, parallel: bool) -> Tools:
    if choice is None:
        choice = "auto"
    if isinstance(choice, str):
        if choice not in _WORDS:
            raise RequestError(
                f"tool_choice: {choice[:40]!r} is none of none, auto, required and {{'type': 'function', 'function': "
                "{'name': ...}}."
            )
        return Tools(functions, choice, parallel=parallel)  # type: ignore[arg-type]
    if not isinstance(choice, Mapping):
        raise RequestError("tool_choice: must be a word or an object.")
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(functions, choice, parallel)
    if kind != "function":
        raise RequestError(f"tool_choice.type: {str(kind)[:40]!r} is not served; it is 'function' or 'allowed_tools'.")
    inner = choice.get("function")
    where, name = (
        ("tool_choice.function.name", inner.get("name"))
        if isinstance(inner, Mapping)
        else ("tool_choice.name", choice.get("name"))
    )
    if not isinstance(name, str):
        raise RequestError(f"{where}: must be the name of a tool.")
    _check_known(where, name, functions)
    return Tools(functions, "named", name, parallel)


def _allowed(functions: tuple[Function, ...], choice: Mapping[str, Any], parallel: bool) -> Tools:
    """The model may call some of the tools that it is told of."""
    nested = choice.get("allowed_tools")
    given = nested if isinstance(nested, Mapping) else choice
    where = "tool_choice.allowed_tools" if given is nested else "tool_choice"
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode: must be 'auto' or 'required'.")
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)) or not listed:
        raise RequestError(f"{where}.tools: must be a list of {{'type': 'function', 'function': {{'name': ...}}}}.")
    names = set()
    for index, one in enumerate(listed[: MAX_TOOLS + 1]):
        inner = one.get("function", one) if isinstance(one, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str):
            raise RequestError(f"{where}.tools[{index}]: must name a tool.")
        _check_known(f"{where}.tools[{index}]", name, functions)
        names.add(name)
    return Tools(functions, mode, parallel=parallel, allowed=frozenset(names))
