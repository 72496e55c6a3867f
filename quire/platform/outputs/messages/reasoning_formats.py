"""Formats of reasoning: by which texts what a model thinks is set apart from what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from quire.platform.outputs.messages.content_reading import read_content
from quire.platform.outputs.messages.text_reader import Reading, TextReader, literals
from quire.platform.outputs.messages.tool_choice import Tools
from quire.platform.outputs.messages.tool_format import Structure, ToolFormat, tag


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Reasoning stands at the beginning of an answer, between two texts; of several of each the first is the usual.

    name: which the operator gives; aliases: further ones.  families: of models, for people.
    signs, unlike: as a ToolFormat's.
    answers: texts around the answer that are no part of it.
    in_text: what follows the reasoning is the answer as it is.
    """

    name: str
    aliases: tuple[str, ...] = ()
    families: str = ""
    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    answers: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    unlike: tuple[str, ...] = ()
    in_text: bool = True

    @property
    def notation(self) -> tuple[str, ...]:
        """All of its texts that may be special tokens."""
        return (*self.begins, *self.ends, *self.answers)

    def begins_in_reasoning(self, prompt: str, continued: str = "") -> bool | None:
        """Whether an answer to a rendered prompt begins within reasoning.

        True: the prompt has opened it.  False: the prompt has closed it, none follows.  None: the model may open it.
        continued: the text of the message that the answer continues, if it continues one.
        """
        end = prompt.rstrip()
        if end.endswith(self.begins):
            return True
        if end.endswith(self.ends):
            return False
        opened = max(continued.rfind(text) for text in self.begins)
        closed = max(continued.rfind(text) for text in self.ends)
        return None if opened == closed else opened > closed

    def shape(
        self, calls: Structure | None, answer: Structure | None, begun: bool | None
    ) -> tuple[Structure, str | None]:
        """Calls or an answer behind the reasoning -> their structure, and the text behind which it begins.

        Where the model may open a reasoning and need not, the structure has both. Free text with calls in it has no
        such beginning: it is free there, too.
        """
        whole = either(calls, answer)
        if begun is not None or whole["type"] == "triggered_tags":
            return whole, self.ends[0] if begun else None
        thought = tag(self.begins[0], {"type": "any_text"}, self.ends[0])
        spaces = {"type": "regex", "pattern": r"\s*"}
        return either({"type": "sequence", "elements": [thought, spaces, whole]}, whole), None

    def read_message(
        self,
        reader: TextReader,
        calls: ToolFormat | None,
        tools: Tools | None,
        begun: bool | None,
        dropped: tuple[str, ...],
    ) -> Reading[None]:
        """Read a whole answer. begun: as `begins_in_reasoning` has it.  dropped: texts that are not shown."""
        if (yield from self._read_begin(reader, begun)):
            drops = tuple(text for text in dropped if text not in self.ends)
            ends = literals((*self.ends, *drops))
            while (found := (yield from reader.until(ends, reader.reasoning))) in drops:
                pass
            if not found:
                return
            reader.end_reasoning()
        if self.answers:
            reader.hold("")
            yield from reader.skip_spaces()
            if (yield from reader.literal(literals(self.answers[:1]))):
                reader.drop_held()
                dropped = (*dropped, *self.answers[1:])
            else:
                reader.give_back()
        yield from read_content(reader, calls, tools, dropped)

    def _read_begin(self, reader: TextReader, begun: bool | None) -> Reading[bool]:
        """Pass over what opens reasoning, which some models write though the prompt has -> whether it is open."""
        reader.hold("")
        yield from reader.skip_spaces()
        found = yield from reader.literal(literals(self.begins))
        if found or begun:
            reader.drop_held()
        else:
            reader.give_back()
        return bool(found or begun)


def either(first: Structure | None, second: Structure | None) -> Structure:
    """One of two structures, or the only one that there is."""
    if first is not None and second is not None:
        return {"type": "or", "elements": [first, second]}
    whole = second if first is None else first
    assert whole is not None, "there is none"
    return whole


FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="think",
        aliases=("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "kimi_k2", "olmo3"),
        families="DeepSeek-R1 and V3.1, Qwen3, QwQ, GLM-4.5 and later, MiniMax M1 and M2, SmolLM3, EXAONE 4, OLMo 3",
        signs=(("<think>", "</think>"),),
        unlike=("<response>",),
    ),
    ReasoningFormat(
        name="granite",
        families="Granite 3.2",
        begins=("Here is my thought process:", "Here's my thought process:", "<think>"),
        ends=("Here is my response:", "Here's my response:", "</think>"),
        answers=("<response>", "</response>"),
        signs=(("Here is my thought process:", "Here is my response:"),),
    ),
    ReasoningFormat(
        name="granite_think",
        aliases=("granite", "ernie45"),
        families="Granite 3.3, ERNIE 4.5 Thinking",
        begins=("<think>",),
        ends=("</think>",),
        answers=("<response>", "</response>"),
        signs=(("<think></think>", "<response></response>"),),
    ),
    ReasoningFormat(
        name="mistral",
        families="Magistral",
        begins=("[THINK]",),
        ends=("[/THINK]",),
        signs=(("[THINK]", "[/THINK]"),),
    ),
    ReasoningFormat(
        name="seed_oss",
        families="Seed-OSS",
        begins=("<seed:think>",),
        ends=("</seed:think>",),
        signs=(("<seed:think>", "</seed:think>"),),
    ),
)
