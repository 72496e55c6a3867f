"""Texts given to a parser in parts, and what must come of them however they are cut."""

from __future__ import annotations

import random
from typing import Any

from quire.platform.outputs.messages import plugins
from quire.platform.outputs.messages.message import ArgumentsDelta, CallBegin, ContentDelta, Delta, Message, collect
from quire.platform.outputs.messages.message_format import REASONING_FORMATS, MessageFormat
from quire.platform.outputs.messages.tool_choice import Tools, check_tools

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def tools(*given: Any, choice: Any = None, parallel: bool | None = None) -> Tools:
    made = check_tools(list(given or (WEATHER, TIME)), choice, parallel)
    assert made is not None
    return made


def message_format(tool_parser: str | None = None, reasoning: str | None = None, specials: Any = ()) -> MessageFormat:
    thought = next((one for one in REASONING_FORMATS if reasoning in (one.name, *one.aliases)), None)
    assert (thought is None) == (reasoning is None)
    return MessageFormat(plugins.tool_format(tool_parser) if tool_parser else None, thought, frozenset(specials))


def read(format: MessageFormat, parts: list[str], given: Tools | None = None, **options: Any) -> list[Delta]:
    """The deltas of an answer that comes in parts."""
    cut = options.pop("cut", False)
    parser = format.parser(tools() if given is None else given, **options)
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return [*deltas, *parser.finish(cut)]


def message_of(format: MessageFormat, text: str, given: Tools | None = None, **options: Any) -> Message:
    """The message of a text: the same whole, a character at a time, cut once anywhere and cut at random."""
    whole = collect(read(format, [text], given, **options))
    everywhere = range(len(text) + 1)
    places = everywhere if len(text) < 80 else random.Random(len(text)).sample(everywhere, 80)
    cuts = [[text[:place], text[place:]] for place in places]
    cuts.append(list(text))
    chance = random.Random(text)
    for _ in range(10):
        ends = sorted(chance.choices(range(len(text) + 1), k=5))
        cuts.append([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)])
    for parts in cuts:
        deltas = read(format, parts, given, **options)
        _check_order(deltas)
        assert collect(deltas) == whole, parts
    return whole


def _check_order(deltas: list[Delta]) -> None:
    """A call's name comes before its arguments, calls come in order, and nothing is empty."""
    begun = -1
    for delta in deltas:
        if isinstance(delta, CallBegin):
            assert delta.place == begun + 1
            begun = delta.place
        else:
            assert delta.text
            assert not isinstance(delta, ArgumentsDelta) or delta.place == begun


def content(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
