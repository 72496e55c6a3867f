"""gpt-oss' notation, harmony: an answer is messages on channels, of which one is for reasoning and one for the answer.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A call is a message to a function: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>.
Source: OpenAI's "Harmony response format" (its cookbook, 2025).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.outputs.messages.json_text import read_arguments
from quire.platform.outputs.messages.reasoning_formats import ReasoningFormat, either
from quire.platform.outputs.messages.text_reader import Literals, Malformed, Reading, TextReader, literals
from quire.platform.outputs.messages.tool_choice import Function, Tools
from quire.platform.outputs.messages.tool_format import Structure, ToolFormat, tag

_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_HEAD = Literals(_MARKS)
_STARTS = Literals((*_MARKS, " to=", "to="))
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
_MAX_HEAD = 1024


@dataclass(frozen=True, kw_only=True)
class HarmonyCalls(ToolFormat):
    """Calls are messages, which `HarmonyChannels` reads."""

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """Nothing: messages are read as a whole."""
        raise Malformed
        yield

    def call(self, function: Function, schema: Structure) -> Structure:
        """A message to a function. The token that ends it ends the answer."""
        return tag(f"<|channel|>commentary to=functions.{function.name} <|constrain|>json<|message|>", schema, "")

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """One: the model waits for its result."""
        return super().calls(functions, False)


@dataclass(frozen=True, kw_only=True)
class HarmonyChannels(ReasoningFormat):
    """Reasoning is what the channel "analysis" says."""

    @property
    def notation(self) -> tuple[str, ...]:
        """Its special tokens."""
        return _MARKS

    def begins_in_reasoning(self, prompt: str, continued: str = "") -> bool | None:
        """True: a message of reasoning is open.  False: another one.  None: a message is about to begin."""
        head, message, _ = prompt.rpartition("<|start|>")[2].rpartition("<|message|>")
        return _channel(head) == "analysis" if message else None

    def shape(
        self, calls: Structure | None, answer: Structure | None, begun: bool | None
    ) -> tuple[Structure, str | None]:
        """Messages, behind one of reasoning if there is one."""
        if answer is not None and begun is not False:
            answer = tag("<|channel|>final<|message|>", answer, "")
        whole = either(calls, answer)
        if begun is not None or whole["type"] == "triggered_tags":
            return whole, "<|end|><|start|>assistant" if begun else None
        thought = tag(self.begins[0], {"type": "any_text"}, "<|end|>")
        start = {"type": "const_string", "value": "<|start|>assistant"}
        return either({"type": "sequence", "elements": [thought, start, whole]}, whole), None

    def read_message(
        self,
        reader: TextReader,
        calls: ToolFormat | None,
        tools: Tools | None,
        begun: bool | None,
        dropped: tuple[str, ...],
    ) -> Reading[None]:
        """Messages, one after the other."""
        drops = tuple(text for text in dropped if text not in _MARKS)
        if begun is not None:
            yield from _read_body(reader, "analysis" if begun else "final", drops)
        while (yield from reader.peek()):
            head = yield from _read_head(reader)
            if head is None:
                yield from _read_body(reader, "final", drops)
                continue
            called = _RECIPIENT.search(head)
            if called and calls is not None and tools is not None:
                try:
                    yield from read_arguments(reader, called[1])
                    yield from reader.until(literals((*_BODY_ENDS, *drops)), _pass_over)
                    continue
                except Malformed:
                    reader.give_back()
            yield from _read_body(reader, _channel(head), drops)


HARMONY = HarmonyChannels(
    name="openai_gptoss",
    aliases=("harmony", "openai", "gptoss"),
    families="gpt-oss",
    begins=("<|channel|>analysis<|message|>",),
    ends=("<|end|><|start|>assistant<|channel|>final<|message|>",),
    signs=(("<|channel|>", "<|message|>", "analysis"),),
    in_text=False,
)
HARMONY_CALLS = HarmonyCalls(
    name="openai",
    aliases=("harmony", "gptoss", "openai_gptoss"),
    families="gpt-oss",
    begins=("<|channel|>commentary to=functions.",),
    marks=_MARKS,
    signs=HARMONY.signs,
    together=HARMONY.name,
)


def _channel(head: str) -> str:
    found = _CHANNEL.search(head)
    return found[1] if found else "final"


def _read_head(reader: TextReader) -> Reading[str | None]:
    """What stands before a message's text; None where no message begins, but text."""
    parts: list[str] = []
    length = 0

    def take(text: str) -> None:
        nonlocal length
        length += len(text)
        if length > _MAX_HEAD:
            raise Malformed
        parts.append(text)

    reader.hold("")
    first = yield from reader.literal(_STARTS)
    try:
        while first and (found := (yield from reader.until(_HEAD, take))) != "<|message|>":
            if not found:
                break  # the text ends in a head, which says nothing
            take(found)
    except Malformed:
        first = ""
    if first:
        reader.drop_held()
        return first + "".join(parts)
    reader.give_back()
    return None


def _read_body(reader: TextReader, channel: str, dropped: tuple[str, ...]) -> Reading[None]:
    """A message's text."""
    show = reader.reasoning if channel == "analysis" else reader.content
    reader.begin_part(channel == "analysis")
    ends = literals((*_BODY_ENDS, *dropped))
    while (found := (yield from reader.until(ends, show))) in dropped:
        pass
    if found == "<|channel|>":
        reader.at -= len(found)  # of the next message's head


def _pass_over(text: str) -> None:
    """Of a call, behind its arguments."""
