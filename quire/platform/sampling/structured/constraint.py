"""What a shape comes to: grammars for llguidance, and where in an answer each of them is in force. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trigger:
    """In free text, `text` begins a shaped part.

    text: as the tokens spell it; a special token counts as its own text.
    grammar: of what follows `text`, as llguidance.LLMatcher takes it. The text is free again where
        that can go on no further.
    """

    text: str
    grammar: str


@dataclass(frozen=True, slots=True)
class CompiledConstraint:
    """What may be generated, in this order. At least one of grammar and triggers is given.

    after: all is free until this text has been generated; what follows is in force behind it. None: at once.
    opens: `after` is awaited only where the answer begins with this text, white space aside. None: always. With a
        grammar that comes first, it is none.
    grammar: as llguidance.LLMatcher takes it: what comes first. With no triggers the answer ends with it;
        otherwise free text follows where it ends. None: free text at once.
    triggers: of the free text. No text is another's beginning.
    stop_after_first: the answer ends where the first trigger's grammar does.
    """

    grammar: str | None = None
    triggers: tuple[Trigger, ...] = ()
    stop_after_first: bool = False
    after: str | None = None
    opens: str | None = None
