"""How a model's answers are read: its format of tool calls and that of its reasoning, together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from quire.errors import QuireError, RequestError
from quire.platform.outputs.messages import plugins, reasoning_formats, tool_formats
from quire.platform.outputs.messages.content_reading import read_content
from quire.platform.outputs.messages.harmony import HARMONY, HARMONY_CALLS
from quire.platform.outputs.messages.message import MessageParser
from quire.platform.outputs.messages.reasoning_formats import ReasoningFormat, either
from quire.platform.outputs.messages.text_reader import ReadingParser, TextReader
from quire.platform.outputs.messages.tool_choice import CALLS_ALONE, Tools
from quire.platform.outputs.messages.tool_format import Structure, ToolFormat
from quire.platform.outputs.messages.tool_formats import PLAIN
from quire.platform.sampling.structured.params import StructuredOutputsParams

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

NONE = "none"  # the name of no format
REASONING_FORMATS = (*reasoning_formats.FORMATS, HARMONY)


@dataclass(frozen=True)
class MessageFormat:
    """tools, reasoning: the formats, None where the model has none that is known.

    specials: the texts of the tokenizer's special tokens.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    specials: frozenset[str] = frozenset()

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the parser has to see the texts of special tokens: skip_special_tokens=False, for the engine."""
        return any(text in self.specials for text in self._notation())

    def _notation(self) -> tuple[str, ...]:
        return (*(self.tools.notation if self.tools else ()), *(self.reasoning.notation if self.reasoning else ()))

    def begins_in_reasoning(self, prompt: str, continued: str = "") -> bool | None:
        """Whether an answer to a rendered prompt begins within reasoning: see ReasoningFormat. None without any."""
        return None if self.reasoning is None else self.reasoning.begins_in_reasoning(prompt, continued)

    def parser(
        self,
        tools: Tools | None,
        begins_in_reasoning: bool | None = None,
        *,
        request_id: str = "",
        choice: int = 0,
        keep_special_tokens: bool = False,
    ) -> MessageParser:
        """A parser of one answer. tools: of the request; None: calls are content. With choice "none" they are left out.

        request_id, choice: of which calls' ids are made, so that they are the same each time.
        keep_special_tokens: the request wants to see those that are no notation.
        """
        format = None if tools is None else self.tools if tools.choice == "none" else self._format_of(tools)
        short = format is not None and format.short_ids
        reader = TextReader(
            lambda place: call_id(request_id, choice, place, short),
            None if tools is None else tools.most,
            calls_alone=tools is not None and tools.forced,
        )
        dropped: tuple[str, ...] = ()
        if self.needs_special_tokens and not keep_special_tokens:
            dropped = _others(self.specials, format.begins if format else ())
        if self.reasoning is None:
            return ReadingParser(reader, read_content(reader, format, tools, dropped))
        reading = self.reasoning.read_message(reader, format, tools, begins_in_reasoning, dropped)
        return ReadingParser(reader, reading)

    def constraint(
        self,
        tools: Tools | None,
        answer: StructuredOutputsParams | None = None,
        begins_in_reasoning: bool | None = None,
        *,
        strict: bool = True,
    ) -> StructuredOutputsParams | None:
        """What tokens must follow, None for any: tools that are to be called, or may be, and the answer's own shape.

        strict: calls of the model's own accord are shaped by their functions' schemas.

        Raises RequestError for tools that may be called where the format of calls is not known, and for a shape of
        answers that are to be calls alone.
        """
        if tools is not None and tools.forced and answer is not None:
            raise RequestError(f"structured_outputs: tool_choice {CALLS_ALONE}")
        calls = None if tools is None or tools.choice == "none" else self._calls(tools, answer is not None, strict)
        reasoning = self.reasoning
        if calls is None:
            if answer is None:
                return None
            if reasoning is None or (reasoning.in_text and begins_in_reasoning is not None):
                return replace(answer, after=reasoning.ends[0] if reasoning and begins_in_reasoning else None)
        shape = None if answer is None else structure_of(answer)
        whole, after = (
            (either(calls, shape), None) if reasoning is None else reasoning.shape(calls, shape, begins_in_reasoning)
        )
        opens = None
        may_open = reasoning is not None and reasoning.in_text and begins_in_reasoning is None
        if reasoning is not None and may_open and whole["type"] == "triggered_tags":
            opens, after = reasoning.begins[0], reasoning.ends[0]
        kept = {} if answer is None else {name: getattr(answer, name) for name in _SPACING}
        tag = {"type": "structural_tag", "format": whole}
        return StructuredOutputsParams(structural_tag=tag, after=after, opens=opens, **kept)

    def _calls(self, tools: Tools, shaped: bool, strict: bool) -> Structure | None:
        """The shape of calls, alone or in free text; None for any. shaped: where there is none, the answer has one."""
        format = self._format_of(tools)
        if tools.forced or shaped:
            return format.calls(tools.callable, tools.most is None)
        return format.text_with_calls(tools.callable, tools.most is None) if strict else None

    def _format_of(self, tools: Tools) -> ToolFormat:
        """The format of these tools' calls: where it is not known, calls that are asked for are JSON."""
        return PLAIN if self.tools is None and tools.forced else self.check_tools()

    def check_tools(self) -> ToolFormat:
        """The format of tool calls. Raises RequestError where there is none."""
        if self.tools is None:
            raise RequestError(
                "tools: how this model writes calls of tools cannot be told from its chat template; start the server "
                f"with --tool-call-parser, one of {', '.join(sorted(one.name for one in tool_formats.FORMATS))}."
            )
        return self.tools


_SPACING = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def structure_of(answer: StructuredOutputsParams) -> Structure:
    """A shape of answers as one of the formats that structural tags are made of."""
    if answer.structural_tag is not None:
        from quire.platform.sampling.structured.structural_tags import format_of  # it takes a twentieth of a second

        tag: Structure = format_of(answer.structural_tag)
        return tag
    if answer.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if answer.regex is not None:
        return {"type": "regex", "pattern": answer.regex}
    if answer.grammar is not None:
        return {"type": "grammar", "grammar": answer.grammar}
    if answer.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in answer.choice]}
    return {"type": "json_schema", "json_schema": answer.json}


@lru_cache(maxsize=64)
def _others(specials: frozenset[str], begins: tuple[str, ...]) -> tuple[str, ...]:
    """Special tokens that are not shown."""
    return tuple(sorted(text for text in specials if text and text not in begins))


def call_id(request_id: str, choice: int, place: int, short: bool = False) -> str:
    """The id of a call: the same for the same request. short: nine letters and digits."""
    digest = hashlib.sha256(f"{request_id}\n{choice}\n{place}".encode()).digest()
    if not short:
        return f"chatcmpl-tool-{digest[:16].hex()}"
    number = int.from_bytes(digest[:16])
    return "".join(_LETTERS[number // len(_LETTERS) ** digit % len(_LETTERS)] for digit in range(9))


def formats_of(
    tokenizer: Any,
    template: str | None = None,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> MessageFormat:
    """The formats of a model's messages, by name or, where that is certain, by its chat template.

    template: that is used, if it is not the tokenizer's own. Of several named ones all are looked at.
    tool_parser, reasoning_parser: names; "none": calls, or reasoning, are not told apart.

    Raises QuireError for a name that nobody has, naming those that there are.
    """
    text = _template_text(tokenizer, template)
    if not tool_parser:
        tools = _recognized(tool_formats.FORMATS, text)
    else:
        tools = None if tool_parser == NONE else plugins.tool_format(tool_parser, lambda found: _fits(found, text))
    if not reasoning_parser and tools is not None and tools.together:
        reasoning_parser = tools.together
    if not reasoning_parser:
        reasoning = _recognized(REASONING_FORMATS, text)
    else:
        reasoning = None if reasoning_parser == NONE else _reasoning_named(reasoning_parser, text)
    if reasoning is HARMONY and tools is None and not tool_parser:
        tools = HARMONY_CALLS
    if tools is HARMONY_CALLS and reasoning_parser == NONE:
        tools = None
    if (tools or HARMONY_CALLS) is not HARMONY_CALLS if reasoning is HARMONY else tools is HARMONY_CALLS:
        raise QuireError(
            f"tool_call_parser={tool_parser!r}, reasoning_parser={reasoning_parser!r}: {HARMONY_CALLS.name} and "
            f"{HARMONY.name} are one notation, and go with each other alone."
        )
    return MessageFormat(tools, reasoning, _specials(tokenizer))


def _reasoning_named(name: str, template: str) -> ReasoningFormat:
    return plugins.reasoning_format(name, REASONING_FORMATS, lambda found: _fits(found, template))


def _template_text(tokenizer: Any, template: str | None) -> str:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        own = "\n".join(str(one) for one in own.values()) if template is None else own.get(template, template)
    elif template is not None:
        own = template
    text = own if isinstance(own, str) else ""
    return text.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")


def _recognized(formats: Sequence[Any], template: str) -> Any:
    """The one format that a template's signs are of; None where there is none, or more than one."""
    found = [one for one in formats if _fits(one, template)]
    return found[0] if len(found) == 1 else None


def _fits(format: Any, template: str) -> bool:
    """Whether the template has the signs of a format."""
    some = any(all(sign in template for sign in group) for group in format.signs)
    return some and not any(sign in template for sign in format.unlike)


def _specials(tokenizer: Any) -> frozenset[str]:
    """The texts of the tokens that skip_special_tokens leaves out."""
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {str(token) for token in added.values() if token.special}
    return frozenset(marked | set(getattr(tokenizer, "all_special_tokens", ())))
