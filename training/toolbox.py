"""Tools that may be called, and requests that they fit.

Tools differ in names, parameters, number and order, so that the model learns to read their list. Calls and wordings
chosen by a hash are held out of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from world import COLORS, KINDS, NAMES, PLACES, THINGS, _chosen, say

FAILED = "That did not work."
DONE = "Done."

_CITIES = ("Paris", "London", "Berlin", "Rome", "Tokyo", "Madrid", "Oslo", "Cairo", "Lima", "Boston", "San Francisco",
           "New York", "Vienna", "Prague", "Delhi", "Seoul")  # fmt: skip
_SYLLABLES = ("ba", "co", "del", "fi", "gor", "hu", "ja", "kel", "lo", "mir", "na", "pos", "qui", "ra", "sto", "tu",
              "vex", "wa", "yo", "zin")  # fmt: skip
# Of each class of values, the names that a parameter for it may have, the usual one first.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "kind": ("shape", "kind", "form", "figure", "type", "shape_name", "what"),
    "color": ("color", "colour", "paint", "tint", "shape_color"),
    "name": ("name", "who", "person", "friend", "user"),
    "place": ("place", "where", "location", "to", "destination", "target"),
    "thing": ("thing", "item", "object", "object_name", "goods"),
    "number": ("number", "count", "times", "n", "amount", "size", "steps"),
    "other": ("other", "b", "y", "second", "right"),
    "first": ("first", "a", "x", "number", "left"),
    "city": ("city", "location", "town", "place"),
    "word": ("query", "word", "text", "topic", "q", "term", "input", "subject"),
}


@dataclass(frozen=True)
class Action:
    """Something that a tool may do: its names, its parameters' classes and how it is asked for.

    result: what the tool says afterwards.
    """

    key: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    wordings: tuple[str, ...]
    result: str = "done"


_POLITE = ("{}", "{}", "{}", "Please {}", "Can you {}?", "Could you {}?", "I want you to {}", "{} please", "Now {}",
           "Would you {}?", "Use a tool to {}", "{} for me", "I'd like you to {}")  # fmt: skip
ACTIONS: tuple[Action, ...] = (
    Action("draw", ("draw", "draw_shape", "paint", "drawShape", "create_shape", "add_shape", "make", "draw_figure",
                    "plot"),
           ("kind", "color"),
           ("draw {a_color} {kind}", "draw {a_color} {kind}", "make {a_color} {kind}", "paint {a_color} {kind}",
            "add {a_color} {kind}", "create {a_color} {kind}", "draw a {kind} in {color}",
            "draw a {kind} that is {color}", "draw me {a_color} {kind}", "show me {a_color} {kind}",
            "put {a_color} {kind} there", "draw the {color} {kind}", "draw {color} {kind}", "sketch {a_color} {kind}",
            "! I want {a_color} {kind}.", "! I need {a_color} {kind}.",
            "! {color} {kind}, draw it.", "! A drawing of {a_color} {kind}, please.")),
    Action("count", ("count", "count_shapes", "how_many", "get_count", "countShapes", "number_of"), ("kind",),
           ("! How many {kinds} are there?", "! How many {kinds} are there?", "! How many {kinds} do you see?",
            "count the {kinds}", "count the {kinds}", "count all {kinds}", "tell me how many {kinds} there are",
            "! How many {kinds}?", "! What is the number of {kinds}?", "find out how many {kinds} there are",
            "! How many {kinds} are there? Use {tool}.", "! Are there {kinds}? How many?", "count every {kind}",
            "! How many {kinds} have we got?", "! How many {kinds} can you find?", "give me the number of {kinds}",
            "! The number of {kinds}, please.", "! Do you know how many {kinds} there are?",
            "check how many {kinds} we have",
            "! How many of them are {kinds}?"), "count"),
    Action("remove", ("remove", "erase", "delete", "remove_shape", "clear"), ("kind", "color"),
           ("remove the {color} {kind}", "erase the {color} {kind}", "delete the {color} {kind}",
            "take the {color} {kind} away", "take away the {color} {kind}")),
    Action("color_of", ("get_color", "color_of", "find_color", "look", "getColor", "look_at"), ("kind",),
           ("! What color is the {kind}?", "! Which color is the {kind}?", "! What colour is the {kind}?",
            "find the color of the {kind}", "tell me the color of the {kind}", "look at the {kind}"), "color"),
    Action("color_shape", ("set_color", "color", "recolor", "fill", "dye"), ("kind", "color"),
           ("make the {kind} {color}", "color the {kind} {color}", "paint the {kind} {color}",
            "turn the {kind} {color}", "change the color of the {kind} to {color}")),
    Action("move", ("move", "move_shape", "bring", "push", "carry"), ("kind", "place"),
           ("move the {kind} to the {place}", "bring the {kind} to the {place}", "push the {kind} to the {place}",
            "put the {kind} at the {place}", "take the {kind} to the {place}")),
    Action("go", ("go", "send", "walk", "travel", "go_to"), ("name", "place"),
           ("send {name} to the {place}", "let {name} go to the {place}", "! {name} should go to the {place}.",
            "! {name} wants to go to the {place}.", "take {name} to the {place}")),
    Action("find", ("find", "get", "fetch", "search_thing", "locate"), ("thing",),
           ("find the {thing}", "get the {thing}", "! Where is the {thing}?", "fetch the {thing}", "find me a {thing}",
            "! I lost my {thing}."), "place"),
    Action("give", ("give", "hand_over", "pass", "give_thing", "deliver"), ("thing", "name"),
           ("give the {thing} to {name}", "give {name} the {thing}", "hand the {thing} to {name}",
            "! {name} needs the {thing}.", "bring {name} the {thing}")),
    Action("jump", ("jump", "repeat", "hop", "do_jumps"), ("name", "number"),
           ("let {name} jump {number} times", "! {name} should jump {number} times.", "make {name} jump {number} times",
            "make {name} hop {number} times")),
    Action("resize", ("resize", "set_size", "scale", "grow"), ("kind", "number"),
           ("make the {kind} {number} big", "set the size of the {kind} to {number}", "resize the {kind} to {number}",
            "scale the {kind} to {number}")),
    Action("draw_many", ("draw_many", "draw_shapes", "add_shapes"), ("number", "kind", "color"),
           ("draw {number} {color} {kinds}", "make {number} {color} {kinds}", "add {number} {color} {kinds}",
            "! I want {number} {color} {kinds}.")),
    Action("weather", ("get_weather", "weather", "getWeather", "get_current_weather", "forecast"), ("city",),
           ("! What is the weather in {city}?", "! How is the weather in {city}?", "tell me the weather in {city}",
            "! What's the weather like in {city}?", "get the weather in {city}", "! Is it raining in {city}?"),
           "weather"),
    Action("search", ("search", "look_up", "web_search", "lookup", "find_word"), ("word",),
           ("search for {word}", "look up {word}", "! What is {word}?", "! Who knows about {word}?",
            "find something about {word}", 'search for "{word}"'), "fact"),
    Action("add", ("add", "sum", "plus", "add_numbers", "calculate_sum"), ("first", "other"),
           ("! What is {first} plus {other}?", "add {first} and {other}", "! {first} + {other}?",
            "add {first} to {other}", "! How much is {first} + {other}?", "! What is {first} + {other}?"), "number"),
    Action("time", ("get_time", "now", "clock", "current_time", "get_date"), (),
           ("! What time is it?", "tell me the time", "! How late is it?", "! What is the time?"), "number"),
)  # fmt: skip
_USE = ("use {tool} with {given}", "call {tool} with {given}", "run {tool} with {given}",
        "use the tool {tool}: {given}", "call {tool} ({given})")  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A tool as one conversation has it: ``parameters`` gives each class its parameter's name."""

    action: Action
    name: str
    parameters: tuple[tuple[str, str], ...]  # class, name
    enums: tuple[str, ...] = ()  # classes whose values are listed
    lax: bool = False  # no parameter is said to be required
    extra: str = ""  # the name of one more parameter, a number that may be left out

    def schema(self) -> dict[str, Any]:
        """As clients send it."""
        properties: dict[str, Any] = {}
        for value_class, name in self.parameters:
            number = value_class in ("number", "first", "other")
            properties[name] = {"type": "integer" if number else "string"}
            if value_class in self.enums:
                properties[name]["enum"] = list(KINDS if value_class == "kind" else sorted(COLORS)[:5])
        if self.extra:
            properties[self.extra] = {"type": "integer"}
        required = [] if self.lax else [name for _, name in self.parameters]
        return tool_schema(self.name, properties, required)


def tool_schema(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@dataclass(frozen=True)
class Request:
    """What the user says, the call that is right, and what the tool and the assistant say afterwards."""

    text: str
    name: str
    arguments: dict[str, Any]
    result: str
    answer: str

    def call(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# --------------------------------------------------------------------------------------------
# Tools and requests
# --------------------------------------------------------------------------------------------


def make_tools(rng: Random, count: int, first: Sequence[Action] = ()) -> list[Tool]:
    """So many tools, those of ``first`` among them, in any order; no two have the same name or do much the same."""
    # Drawing and counting are what people try first.
    some = [action for action in ACTIONS if rng.random() < (0.7 if action.key in ("draw", "count") else 0.3)]
    rng.shuffle(some)
    actions = list(dict.fromkeys([*first, *some]))
    tools: list[Tool] = []
    for action in actions[: max(count, len(first))]:
        tool = make_tool(rng, action)
        if tool.name not in [other.name for other in tools] and not clash(action, [t.action for t in tools]):
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def clash(action: Action, others: Sequence[Action]) -> bool:
    """Whether one request could mean either."""
    same = ({"draw", "draw_many"}, {"find", "search"}, {"color_shape", "draw"}, {"add", "search"}, {"time", "search"})
    return any({action.key, other.key} in same for other in others)


def make_tool(rng: Random, action: Action) -> Tool:
    """The action as a tool, by its usual names or by others."""
    usual = rng.random() < 0.4
    name = action.names[0] if usual else rng.choice(action.names)
    if rng.random() < 0.07:
        name = made_up(rng) if rng.random() < 0.6 else f"{name}_{made_up(rng)}"
    taken: list[str] = []
    for value_class in action.classes:
        pool = [one for one in PARAMETERS[value_class] if one not in taken]
        if action.key == "count" and value_class == "kind":
            pool = ["kind", *pool]
        taken.append(pool[0] if usual or rng.random() < 0.4 else rng.choice(pool))
        if rng.random() < 0.04:
            taken[-1] = made_up(rng)
    parameters = tuple(zip(action.classes, taken, strict=True))
    enums = tuple(one for one in ("kind",) if one in action.classes and rng.random() < 0.15)
    extra = "size" if action.key == "draw" and "size" not in taken and rng.random() < 0.15 else ""
    return Tool(action, name, parameters, enums, rng.random() < 0.1, extra)


def plain_tool(action: Action) -> Tool:
    """The action by its usual names."""
    names = [PARAMETERS[value_class][0] for value_class in action.classes]
    if action.key == "count":
        names = ["kind"]
    return Tool(action, action.names[0], tuple(zip(action.classes, names, strict=True)))


def made_up(rng: Random) -> str:
    return "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3)))


def held_out(action: Action, values: dict[str, Any]) -> bool:
    """Whether this call is kept out of training, whatever the tool's names."""
    return bool(values) and _chosen(f"call|{action.key}|{'|'.join(str(values[one]) for one in action.classes)}")


def wording_held_out(wording: str) -> bool:
    return _chosen(f"call wording|{wording}")


def make_request(rng: Random, tool: Tool, held: bool = False, known: bool = False) -> Request:
    """A request that the tool fits; held: one that training never has, by its values or by its wording; known: of
    shapes, colours, names and places that there are."""
    action = tool.action
    while True:
        values = {value_class: _value(rng, value_class, known) for value_class in action.classes}
        wording = rng.choice(action.wordings)
        if (held_out(action, values) or wording_held_out(wording)) == held:
            break
    arguments = {name: values[value_class] for value_class, name in tool.parameters}
    named = tool.name not in action.names or (tool.parameters and rng.random() < 0.08)
    if named and not held:
        form = rng.choice(("{} {}", "{}={}", "{}: {}", "{} = {}"))
        given = rng.choice((", ", " and ")).join(form.format(*pair) for pair in arguments.items()) or "nothing"
        wording = rng.choice(_USE).format(tool=tool.name, given=given)
        text = _asked(rng, wording)
    else:
        text = _asked(rng, wording.format(**_spoken(rng, values, tool)))
        if tool.extra and rng.random() < 0.5:
            arguments[tool.extra] = rng.randint(1, 20)
            mark = text[-1] if text[-1] in ".?!" else ""
            how = rng.choice((" of size {}", " with size {}", ", size {}"))
            text = text.removesuffix(mark) + how.format(arguments[tool.extra]) + mark
    return Request(text, tool.name, arguments, *_outcome(rng, action, values))


def _value(rng: Random, value_class: str, known: bool = False) -> Any:
    if value_class in ("number", "first", "other"):
        return rng.randint(1, 12) if rng.random() < 0.7 else rng.randint(13, 120)
    if value_class == "word":
        return (
            " ".join(made_up(rng) for _ in range(rng.choice((1, 1, 2)))) if rng.random() < 0.6 else rng.choice(THINGS)
        )
    if value_class == "city":
        return rng.choice(_CITIES) if rng.random() < 0.6 else made_up(rng).capitalize()
    pools = {"kind": KINDS, "color": tuple(COLORS), "name": NAMES, "place": PLACES, "thing": THINGS}
    if not known and rng.random() < 0.06:  # what nobody has heard of is passed on as it is
        return made_up(rng).capitalize() if value_class == "name" else made_up(rng)
    return rng.choice(pools[value_class])


def _spoken(rng: Random, values: dict[str, Any], tool: Tool) -> dict[str, str]:
    words = {key: str(value) for key, value in values.items()} | {"tool": tool.name}
    if "kind" in words:
        words["kinds"] = words["kind"] + "s"
    if "color" in words:
        words["a_color"] = f"{'an' if words['color'][0] in 'aeiou' else 'a'} {words['color']}"
    if values.get("number") in (1, 2, 3) and rng.random() < 0.4:
        words["number"] = ("one", "two", "three")[values["number"] - 1]
    return words


def _asked(rng: Random, wording: str) -> str:
    """Something to do as a sentence; what begins with "!" is one already."""
    if wording.startswith("! "):
        return _upper(wording[2:])
    text = rng.choice(_POLITE).format(wording)
    return _upper(text) + ("" if text.endswith("?") else ".")


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _outcome(rng: Random, action: Action, values: dict[str, Any]) -> tuple[str, str]:
    """What the tool says, and the words that the assistant makes of it."""
    if rng.random() < 0.04:
        return rng.choice(('{"error": "it failed"}', "Error: no paint", "error", '{"error": "not found"}')), FAILED
    if action.result == "done":
        said = ("done", '{"result": "done"}', "ok", '{"status": "ok"}', "true", "null", "Drawn.", '{"ok": true}',
                "Done", '{"success": true}', '"done"', "None")  # fmt: skip
        return rng.choice(said), DONE
    if action.result in ("count", "number"):
        number = rng.randint(0, 12) if rng.random() < 0.8 else rng.randint(13, 200)
        key = rng.choice(("result", "count", "number", "value", "answer", "total"))
        said = rng.choice((str(number), str(number), f'{{"{key}": {number}}}', f"There are {number}."))
        if action.result == "number":
            return said, f"It is {number}."
        kind = values["kind"]
        return said, f"There is 1 {kind}." if number == 1 else f"There are {number} {kind}s."
    pools = {"color": tuple(COLORS), "place": tuple(f"the {place}" for place in PLACES),
             "weather": ("sunny", "rainy", "cold", "warm", "windy", "cloudy"), "fact": tuple(KINDS)}  # fmt: skip
    word = rng.choice(pools[action.result]) if rng.random() < 0.8 else made_up(rng)
    key = rng.choice((action.result, "result", "answer", "value"))
    return rng.choice((word, word, json.dumps({key: word}), _upper(word) + ".")), say(word)
