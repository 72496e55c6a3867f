"""Calls of tools in a conversation: checked, and in the form that a chat template takes.

OpenAI's clients give a call's arguments as a text of JSON. Most templates want them as a dict, as transformers says;
some want the text. Some fail where an assistant's message has calls and no content, some look for that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.errors import RequestError

MAX_CALLS = 1024  # of one message
MAX_NAME = 256

_ID_LENGTH = 512
# Mistral's templates raise an exception for ids of any other length.
_SHORT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9")
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


class CallForm(NamedTuple):
    """What a template takes. text: arguments as a text.  empty: a content of "" where there are calls alone."""

    text: bool = False
    empty: bool = False


FORMS = (CallForm(), CallForm(empty=True), CallForm(text=True), CallForm(text=True, empty=True))


def check_calls(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls of tools are checked, in OpenAI's present form: `tool_calls`, and the role "tool".

    `function_call` and the role "function", which came before them, are put into that form.

    Raises RequestError naming the message's index, and the call's.
    """
    checked = dict(message)
    where = f"messages[{index}]"
    if message.get("function_call") is not None:
        if message.get("tool_calls"):
            raise RequestError(f"{where}.function_call: has tool_calls beside it; give one of them.")
        call = checked.pop("function_call")
        checked["tool_calls"] = [{"type": "function", "function": _function(f"{where}.function_call", call)}]
    elif message.get("tool_calls"):
        checked["tool_calls"] = _calls(f"{where}.tool_calls", message["tool_calls"])
    if checked.get("tool_calls") and message["role"] != "assistant":
        raise RequestError(f"{where}.tool_calls: only a message of the assistant calls tools.")
    if message["role"] == "function":
        checked["role"] = "tool"
    for key, most in (("tool_call_id", _ID_LENGTH), ("name", MAX_NAME)) if checked["role"] == "tool" else ():
        value = message.get(key)
        if value is not None and not (isinstance(value, str) and len(value) <= most):
            raise RequestError(f"{where}.{key}: must be a text of at most {most} characters.")
    return checked


def _calls(where: str, given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, (list, tuple)):
        raise RequestError(f"{where}: must be a list of {{'id', 'type': 'function', 'function': {{...}}}}.")
    if len(given) > MAX_CALLS:
        raise RequestError(f"{where}: has {len(given)} calls, and the limit is {MAX_CALLS}.")
    calls = []
    for place, call in enumerate(given):
        here = f"{where}[{place}]"
        if not isinstance(call, Mapping):
            raise RequestError(f"{here}: must be an object, {{'id', 'type': 'function', 'function': {{...}}}}.")
        if call.get("type", "function") != "function":
            raise RequestError(f"{here}.type: must be 'function'; tools of other kinds are not served.")
        name = call.get("id")
        if name is not None and not (isinstance(name, str) and len(name) <= _ID_LENGTH):
            raise RequestError(f"{here}.id: must be a text of at most {_ID_LENGTH} characters.")
        calls.append({**call, "type": "function", "function": _function(f"{here}.function", call.get("function"))})
    return calls


def _function(where: str, given: Any) -> dict[str, Any]:
    """A call's name and arguments, which stay as they are given."""
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: must be an object with a name and arguments.")
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(f"{where}.name: must be a text of 1 to {MAX_NAME} characters.")
    try:
        value = _arguments(arguments)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}.arguments: must be an object as a text of JSON; it is not: {error}.") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}.arguments: must be an object, not {type(value).__name__}.")
    return {**given, "arguments": arguments}


def _arguments(given: Any) -> Any:
    """Arguments as an object. Raises ValueError and RecursionError for a text that is no JSON."""
    if isinstance(given, str):
        return json.loads(given) if given.strip() else {}
    return {} if given is None else given


def fit_calls(messages: Sequence[Mapping[str, Any]], form: CallForm, template: str) -> list[dict[str, Any]]:
    """Messages of `check_messages` as a template takes their calls."""
    short = _SHORT_IDS.search(template) is not None
    return [_fit(message, form, short) for message in messages]


def _fit(message: Mapping[str, Any], form: CallForm, short: bool) -> dict[str, Any]:
    fitted = dict(message)
    calls = message.get("tool_calls")
    if calls:
        fitted["tool_calls"] = [_fit_call(call, form, short) for call in calls]
        if form.empty and not message.get("content"):
            fitted["content"] = []
    if short and message.get("tool_call_id") is not None:
        fitted["tool_call_id"] = _short_id(message["tool_call_id"])
    return fitted


def _fit_call(call: Mapping[str, Any], form: CallForm, short: bool) -> dict[str, Any]:
    given = call["function"]["arguments"]
    if not form.text:
        given = _arguments(given)
    elif not (isinstance(given, str) and given.strip()):
        given = json.dumps(_arguments(given), ensure_ascii=False)
    fitted = {**call, "function": {**call["function"], "arguments": given}}
    if short:
        fitted["id"] = _short_id(call.get("id") or "")
    return fitted


def _short_id(name: str) -> str:
    """Nine letters and digits that stand for an id, which may be such already."""
    return name if _SHORT.fullmatch(name) else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]
