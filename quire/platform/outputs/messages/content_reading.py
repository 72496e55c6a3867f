"""The part of an answer that is content, with calls of tools in it."""

from __future__ import annotations

from quire.platform.outputs.messages.text_reader import Malformed, Reading, TextReader, literals
from quire.platform.outputs.messages.tool_choice import Tools
from quire.platform.outputs.messages.tool_format import ToolFormat


def read_content(
    reader: TextReader, calls: ToolFormat | None, tools: Tools | None, dropped: tuple[str, ...]
) -> Reading[None]:
    """Read to the end of the text. dropped: texts that are not shown."""
    if calls is None or tools is None:
        while (yield from reader.until(literals(dropped), reader.content)):
            pass
        return
    if calls.opens:
        reader.hold("")
        if (yield from reader.skip_spaces()) and reader.text[reader.at] in calls.opens:
            yield from _read_calls(reader, calls, "", tools)
        else:
            reader.give_back()
    watched = literals((*calls.begins, *dropped))
    while found := (yield from reader.until(watched, reader.content)):
        if found in calls.begins:
            reader.hold(found)
            yield from _read_calls(reader, calls, found, tools)


def _read_calls(reader: TextReader, calls: ToolFormat, begun: str, tools: Tools) -> Reading[None]:
    try:
        yield from calls.read_calls(reader, begun, tools)
    except Malformed:
        reader.no_call(begun)
