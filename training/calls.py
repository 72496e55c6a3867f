"""Conversations in which tools are there to be called, to train on, and an exam.

A request that a tool fits is answered by a call of it, and what the tool says by words; any other request is answered
in words at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from dialogues import CHATTER, _allowed, _balanced, _training_scene, _typed
from json_answers import ANSWERS, Asked, Chat, asked_question, asked_shapes, noise
from questions import scene_questions
from toolbox import ACTIONS, Request, Tool, clash, make_request, make_tool, make_tools, plain_tool, tool_schema
from world import describe, say

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Shaped:
    """A conversation and the tools it is held with."""

    messages: Chat
    tools: tuple[dict[str, Any], ...] = ()


# --------------------------------------------------------------------------------------------
# Conversations
# --------------------------------------------------------------------------------------------


def call_chat(rng: Random, plain: float = 0.0) -> Shaped:
    """Requests that tools fit, and others, in one conversation; plain: the chance of tools by their usual names."""
    if plain and rng.random() < plain:
        return plain_chat(rng)
    makers, weights = (_requests, _without, _final, _extraction), (77, 3, 9, 11)
    return rng.choices(makers, weights=weights)[0](rng)


def _start(rng: Random) -> Chat:
    if rng.random() < 0.65:
        return []
    text = rng.choice(("You are a helpful assistant.", "Be brief.", "Use the tools.", "You draw shapes.",
                       "Help the user.", "You can call tools.", "You are quire-demo."))  # fmt: skip
    return [{"role": "system", "content": f"{noise(rng)}{text}"}]


def _requests(rng: Random) -> Shaped:
    """One to four tools, and one to four requests."""
    chat = _start(rng)
    tools = make_tools(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    if not tools:
        tools = [make_tool(rng, rng.choice(ACTIONS))]
    total = rng.randint(1, 3)
    scene = _training_scene(rng) if rng.random() < 0.3 else None
    told = f"{describe(scene, rng)} " if scene else ""
    for number in range(total):
        way = rng.random()
        if way < 0.72:
            count, tool = rng.choices((1, 2, 3), weights=(78, 19, 3))[0], rng.choice(tools)
            asked_for = [tool if n == 0 or rng.random() < 0.5 else rng.choice(tools) for n in range(count)]
            _call(chat, rng, [make_request(rng, one) for one in asked_for], told, number == total - 1)
        elif way < 0.82:
            other = make_tool(rng, rng.choice(ACTIONS[:15]))
            while (
                other.action in [t.action for t in tools]
                or clash(other.action, [t.action for t in tools])
                or (scene and other.action.key in ("count", "color_of"))
            ):
                other = make_tool(rng, rng.choice(ACTIONS[:15]))
            other = replace(other, name=other.action.names[0])
            _say(chat, told + _typed(make_request(rng, other).text, rng), NO_TOOL)
        elif way < 0.91 or scene is None:
            wordings, answer = rng.choice(CHATTER)
            _say(chat, told + _typed(rng.choice(wordings), rng), answer)
        else:
            keys = {t.action.key for t in tools}
            taken: set[str] = set()
            if "color_of" in keys:
                taken |= {"color", "absent"}
            if "count" in keys:
                taken |= {"count", "count kind"}
            if "search" in keys:
                taken |= {"shape"}
            asked = [q for q in _allowed(scene, scene_questions(scene, rng)) if q.kind not in taken]
            for question in _balanced(asked, rng, 1):
                _say(chat, told + _typed(question.text, rng), say(question.answer))
        told = told if not [m for m in chat if m["role"] == "user"] else ""
    if not [m for m in chat if m["role"] == "user"]:
        return _requests(rng)
    return Shaped(chat, tuple(tool.schema() for tool in tools))


def plain_chat(rng: Random, dense: bool = False) -> Shaped:
    """Tools by their usual names, mostly drawing and counting, and some requests; dense: more of them, mostly without
    the tools' results."""
    chat = _start(rng)
    usual = [action for action in ACTIONS[:2] if rng.random() < 0.75]
    others = rng.sample(ACTIONS[2:], rng.choice((0, 0, 1, 2)) if usual else rng.choice((1, 2)))
    tools: list[Tool] = []
    for action in [*usual, *others]:
        if not clash(action, [tool.action for tool in tools]):
            tools.append(plain_tool(action))
    rng.shuffle(tools)
    total = rng.randint(4, 7) if dense else rng.randint(2, 5)
    for number in range(total):
        way = rng.random()
        if way < 0.78:
            bare = dense and rng.random() < 0.75
            count, tool = rng.choices((1, 2), weights=(3, 1))[0], rng.choice(tools)
            asked_for = [tool if n == 0 or rng.random() < 0.6 else rng.choice(tools) for n in range(count)]
            requests = [make_request(rng, one, known=True) for one in asked_for]
            _call(chat, rng, requests, "", number == total - 1, bare)
        elif way < 0.9:
            there = [tool.action for tool in tools]
            missing = [one for one in ACTIONS if one not in there and not clash(one, there)]
            _say(chat, make_request(rng, plain_tool(rng.choice(missing)), known=True).text, NO_TOOL)
        else:
            wordings, answer = rng.choice(CHATTER)
            _say(chat, _typed(rng.choice(wordings), rng), answer)
    return Shaped(chat, tuple(tool.schema() for tool in tools))


def single_chat(rng: Random) -> Shaped:
    """One request, as people try it first: of one of several tools, of two at once, or of none that is there."""
    tools, chat = make_tools(rng, rng.choice((1, 2, 3, 4))), _start(rng) if rng.random() < 0.2 else []
    if not tools:
        return single_chat(rng)
    # Now and then the usual ones among others.
    names = [tool.action.key for tool in tools]
    tools = [plain_tool(one.action) if one.action in ACTIONS[:2] and rng.random() < 0.4 else one for one in tools]
    way = rng.random()
    if way < 0.25:
        missing = [one for one in ACTIONS if one.key not in names and not clash(one, [t.action for t in tools])]
        missing = [one for one in missing if not {tool.name for tool in tools} & set(one.names)]
        other = make_tool(rng, rng.choice(missing))
        while other.name not in other.action.names:  # a request may name its tool
            other = make_tool(rng, other.action)
        _say(chat, _typed(make_request(rng, other).text, rng), NO_TOOL)
        return Shaped(chat, tuple(tool.schema() for tool in tools))
    asked_for = [rng.choice(tools) for _ in range(1 if way < 0.6 else 2)]
    requests = [make_request(rng, one) for one in asked_for]
    chat.append({"role": "user", "content": joined([one.text for one in requests], rng)})
    chat.append({"role": "assistant", "content": None, "tool_calls": [one.call() for one in requests]})
    if rng.random() < 0.2:
        chat += [{"role": "tool", "content": one.result} for one in requests]
        chat.append({"role": "assistant", "content": " ".join(dict.fromkeys(one.answer for one in requests))})
    return Shaped(chat, tuple(tool.schema() for tool in tools))


def _without(rng: Random) -> Shaped:
    """A request for a tool, and none is there."""
    chat = _start(rng)
    action = rng.choice([one for one in ACTIONS if one.key not in ("count", "color_of", "search", "find")])
    _say(chat, _typed(make_request(rng, make_tool(rng, action)).text, rng), NO_TOOL)
    return Shaped(chat)


def _say(chat: Chat, user: str, assistant: str) -> None:
    chat += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _call(chat: Chat, rng: Random, requests: list[Request], told: str, last: bool, bare: bool = False) -> None:
    """The user asks for it all at once; sometimes the conversation ends with the calls; bare: nothing comes of them."""
    chat.append({"role": "user", "content": told + joined([_typed(one.text, rng) for one in requests], rng)})
    chat.append({"role": "assistant", "content": None, "tool_calls": [one.call() for one in requests]})
    if bare or (last and rng.random() < 0.4):
        return
    chat += [{"role": "tool", "content": one.result} for one in requests]
    chat.append({"role": "assistant", "content": " ".join(dict.fromkeys(one.answer for one in requests))})


def joined(texts: list[str], rng: Random) -> str:
    """Several requests as one: as sentences, or tied with "and"."""
    if len(texts) > 1 and rng.random() < 0.6 and not any("?" in text or '"' in text for text in texts):
        first, *others = (text.removesuffix(".") for text in texts)
        first_verb = first.split(" ")[0].lower()
        short = [text[0].lower() + text[1:] if text[0] not in "I" else text for text in others]
        if first_verb in ("draw", "count", "make", "paint", "add", "remove") and rng.random() < 0.7:
            short = [re.sub(rf"^(please |now )?{first_verb} ", "", text) for text in short]
        return f"{', '.join([first, *short[:-1]])} and {short[-1]}."
    return " ".join(text if text[-1] in ".?!" else f"{text}." for text in texts)


_FINAL = ("final_answer", "final_result", "answer", "respond", "finish", "submit", "give_answer", "final_response")
_CLASSES = ("Color", "Answer", "Shape", "Scene", "Count", "Response", "Shapes", "Result", "Output", "Item", "Extract",
            "Info", "Picture", "Data", "ColorOf", "StarColor")  # fmt: skip


def _final(rng: Random) -> Shaped:
    """One tool is there to answer with: all that is asked ends in its call."""
    chat = _start(rng)
    final, parameter = rng.choice(_FINAL), rng.choice((*ANSWERS, "answer", "answer"))
    tools = make_tools(rng, rng.choice((0, 1, 2)))
    schemas = [tool.schema() for tool in tools]
    schemas.insert(rng.randint(0, len(schemas)), tool_schema(final, {parameter: {"type": "string"}}, [parameter]))

    def answer(text: str) -> None:
        request = Request("", final, {parameter: text}, "", "")
        chat.append({"role": "assistant", "content": None, "tool_calls": [request.call()]})

    if tools and rng.random() < 0.6:
        request = make_request(rng, rng.choice(tools))
        chat += [{"role": "user", "content": _typed(request.text, rng)}]
        chat += [{"role": "assistant", "content": None, "tool_calls": [request.call()]}]
        chat += [{"role": "tool", "content": request.result}]
        answer(request.answer)
    else:
        scene = _training_scene(rng)
        for question in _balanced(_allowed(scene, scene_questions(scene, rng)), rng, 1):
            chat += [{"role": "user", "content": f"{describe(scene, rng)} {_typed(question.text, rng)}"}]
            answer(question.answer.removeprefix("the "))
    return Shaped(chat, tuple(schemas)) if chat and chat[-1]["role"] == "assistant" else _final(rng)


def _extraction(rng: Random) -> Shaped:
    """The only tool has the answer's shape; mostly its call is forced, so that only its values are learned."""
    chat, scene = _start(rng), _training_scene(rng)
    asked: Asked = asked_shapes(scene, rng)
    if rng.random() < 0.65:
        picks = _balanced(_allowed(scene, scene_questions(scene, rng)), rng, 1)
        if picks:
            asked = asked_question(picks[0], scene, rng)
    form = rng.choice([one for one in asked.forms if isinstance(one, dict)])
    name = rng.choice((*_CLASSES, "final_result", "final_result", "extract", "return_answer"))
    types = {bool: "boolean", int: "integer", float: "number", list: "array"}
    properties = {key: {"type": types.get(type(value), "string")} for key, value in form.items()}
    chat += [{"role": "user", "content": f"{describe(scene, rng)} {_typed(asked.text, rng)}"}]
    call = Request("", name, form, "", "").call()
    chat += [{"role": "assistant", "content": None, "tool_calls": [call], "given": rng.random() < 0.6}]
    return Shaped(chat, (tool_schema(name, properties, list(form)),))


# --------------------------------------------------------------------------------------------
# The exam
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallItem:
    """A request that training never had; ``expected`` is the calls that are right, or the words."""

    kind: str
    shaped: Shaped
    expected: str


# The first two: with both of these tools and none else; the next two: among tools of any name.
CALL_KINDS = (
    "draw(shape, color)",
    "count(kind)",
    "draw, among others",
    "count, among others",
    "other tools",
    "two calls",
    "after a result",
    "no tool fits",
    "words",
)


def call_exam(rng: Random, size: int) -> list[CallItem]:
    """The kinds of item in turn."""
    return [_call_item(rng, CALL_KINDS[number % len(CALL_KINDS)]) for number in range(size)]


def _call_item(rng: Random, kind: str) -> CallItem:
    by_key = {action.key: action for action in ACTIONS}
    wanted = by_key.get(kind.partition("(")[0].partition(",")[0], rng.choice(ACTIONS))
    tools = make_tools(rng, rng.choice((1, 2, 3, 4)), [wanted])
    tool = next(one for one in tools if one.action == wanted)
    if "(" in kind:
        tools = [plain_tool(action) for action in rng.sample(ACTIONS[:2], 2)]
    elif "among" in kind:
        others = [one for one in tools if one is not tool and one.name != wanted.key]
        tools = [*others[: len(others) // 2], plain_tool(wanted), *others[len(others) // 2 :]]
    tool = next(one for one in tools if one.action == wanted)
    if kind == "no tool fits":
        others = [one for one in tools if one is not tool and one.name not in wanted.names]
        either = any(clash(wanted, [one.action]) for one in others)
        if not others or either or tool.name not in wanted.names:
            return _call_item(rng, kind)
        asked = make_request(rng, tool, held=True)
        return _item(kind, [{"role": "user", "content": asked.text}], others, NO_TOOL)
    if kind == "words":
        wordings, answer = rng.choice(CHATTER)
        return _item(kind, [{"role": "user", "content": rng.choice(wordings)}], tools, answer)
    first = make_request(rng, tool, held=True, known="(" in kind or "among" in kind)
    requests = [first, make_request(rng, rng.choice(tools), held=True)] if kind == "two calls" else [first]
    chat: Chat = [{"role": "user", "content": joined([one.text for one in requests], rng)}]
    if kind == "after a result":
        chat.append({"role": "assistant", "content": None, "tool_calls": [first.call()]})
        chat.append({"role": "tool", "content": first.result})
        return _item(kind, chat, tools, first.answer)
    return _item(kind, chat, tools, "\n".join(json.dumps(one.call()["function"]) for one in requests))


def _item(kind: str, chat: Chat, tools: Sequence[Tool], expected: str) -> CallItem:
    return CallItem(kind, Shaped(chat, tuple(tool.schema() for tool in tools)), expected)


def calls_of(text: str) -> Any:
    """The calls in an answer, as (name, arguments), or what it says when there are none."""
    found = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, flags=re.DOTALL)
    try:
        calls = [json.loads(one) for one in found or text.split("\n")]
        return [(call["name"], call["arguments"]) for call in calls]
    except (ValueError, TypeError, KeyError):
        return text.strip()
