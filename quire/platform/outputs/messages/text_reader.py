"""Text that arrives in parts, and what is made of it: the ground on which formats of messages are read.

A format's reader is a generator that reads as if the whole text lay before it, and yields wherever it needs more. So
the cuts of the text cannot matter: a reader decides nothing before it has the characters that it needs.
Nothing is read twice: the cost is that of the text's length, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from quire.platform.outputs.messages.message import ArgumentsDelta, CallBegin, ContentDelta, Delta, ReasoningDelta

T = TypeVar("T")
# Yields where more text is needed, and returns its result.
Reading = Generator[None, None, T]

MAX_NAME = 256  # characters of a function's name; what is longer is none
_RUN = re.compile(r"[ \t\r\n]*")  # of JSON's spaces


class Malformed(Exception):
    """What stands here is no call. What has been held is content."""


class Literals:
    """Texts to look for. Of two that begin at one place the longer is found."""

    __slots__ = ("_begins", "_first", "_partial", "longest", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        """texts: none of them empty."""
        self.texts = tuple(sorted({text for text in texts if text}, key=lambda text: (-len(text), text)))
        self.longest = max(map(len, self.texts), default=0)
        first: dict[str, list[str]] = {}
        for text in self.texts:
            first.setdefault(text[0], []).append(text)
        self._begins = {char: tuple(texts) for char, texts in first.items()}
        self._partial = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._first = re.compile(f"[{re.escape(''.join(sorted(self._begins)))}]") if self._begins else None

    def here(self, text: str, at: int, ended: bool) -> str | None:
        """The literal that stands at a place, "" if none does, and None where more text has to be seen."""
        begins = self._begins.get(text[at : at + 1])
        if begins is None:
            return "" if ended or at < len(text) else None
        if not ended and len(text) - at < self.longest and text[at:] in self._partial:
            return None
        if not text.startswith(begins, at):
            return ""
        return next(one for one in begins if text.startswith(one, at))

    def begin_with(self, text: str) -> bool:
        """Whether a text is the beginning of a literal, and not all of it."""
        return text in self._partial

    def search(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """The first place where a literal stands, or may (None); the text's end where none does ("")."""
        if self._first is not None:
            for found in self._first.finditer(text, at):
                literal = self.here(text, found.start(), ended)
                if literal != "":
                    return found.start(), literal
        return len(text), ""


@lru_cache(maxsize=256)
def literals(texts: tuple[str, ...]) -> Literals:
    """The same, kept: a tokenizer may have a thousand special tokens, and each answer looks for them."""
    return Literals(texts)


class TextReader:
    """The text that has come, how far it has been read, and what has been made of it."""

    def __init__(
        self, call_id: Callable[[int], str], most_calls: int | None = None, *, calls_alone: bool = False
    ) -> None:
        """call_id: of the call at a place.  most_calls: further ones are dropped.  calls_alone: there is no content:
        what is no call is one that was cut off before its name was known."""
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False  # it has ended where no more was to be generated
        self._calls_alone = calls_alone
        self.calls = 0
        self._call_id = call_id
        self._most_calls = most_calls
        self._deltas: list[Delta] = []
        self._held: list[str] | None = None
        self._spaces: list[str] = []  # that end what was shown, until it is known what follows them
        self._thought_spaces: list[str] = []
        self._thought = False
        self._shown = False
        self._strip = False  # spaces before the content are the notation's

    def add(self, text: str) -> None:
        """More text has come."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self) -> list[Delta]:
        """What has been made since the last time: of each kind that comes in a row, one delta."""
        made, self._deltas = self._deltas, []
        if len(made) < 2:
            return made
        merged: list[Delta] = []
        for (kind, place), group in groupby(made, lambda delta: (type(delta), getattr(delta, "place", None))):
            if kind is CallBegin:
                merged.extend(group)
                continue
            text = "".join(delta.text for delta in group)  # type: ignore[union-attr]  # all others have one
            merged.append(ArgumentsDelta(place, text) if kind is ArgumentsDelta else kind(text))  # type: ignore
        return merged

    # What is read.

    def advance(self, to: int) -> str:
        """The text up to a place, which is read now."""
        passed = self.text[self.at : to]
        self.at = to
        if self._held is not None:
            self._held.append(passed)
        return passed

    def peek(self) -> Reading[str]:
        """The next character, which stays; "" at the end."""
        while self.at >= len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_spaces(self) -> Reading[str]:
        """Pass over JSON's spaces -> the character that follows, which stays; "" at the end."""
        while True:
            end = _RUN.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if end > self.at:
                self.advance(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            yield

    def literal(self, literals: Literals) -> Reading[str]:
        """Pass over the literal that stands here, and return it; "" where none does."""
        while (found := literals.here(self.text, self.at, self.ended)) is None:
            yield
        self.advance(self.at + len(found))
        return found

    def expect(self, literals: Literals) -> Reading[str]:
        """As `literal`. Raises Malformed where none does."""
        found = yield from self.literal(literals)
        if not found:
            raise Malformed
        return found

    def until(self, literals: Literals, take: Callable[[str], None]) -> Reading[str]:
        """Give all text before the next of the literals to `take`, pass over it and return it; "" at the end."""
        while True:
            place, found = literals.search(self.text, self.at, self.ended)
            if place > self.at:
                take(self.advance(place))
            if found:
                self.advance(place + len(found))
                return found
            if self.ended:
                return ""
            yield

    def name_until(self, literals: Literals) -> Reading[tuple[str, str]]:
        """A function's name and the literal behind it. Raises Malformed for one that is too long, or does not end."""
        parts: list[str] = []
        length = 0

        def take(part: str) -> None:
            nonlocal length
            length += len(part)
            if length > MAX_NAME:
                raise Malformed
            parts.append(part)

        end = yield from self.until(literals, take)
        name = "".join(parts).strip()
        if not (end and name):
            raise Malformed
        return name, end

    # What is made of it.

    def hold(self, begun: str) -> None:
        """From here on keep what is read, `begun` before it: it is content, should no call come of it."""
        self._held = [begun]

    def give_back(self) -> None:
        """No call has come of it."""
        held, self._held = self._held, None
        if held:
            self.content("".join(held))

    def drop_held(self) -> None:
        """What is held is notation."""
        self._held = None

    def settle(self, found: str, looked_for: Literals) -> None:
        """What is held is notation if a literal stood behind it, or begins to where the text was cut; else content."""
        if found:
            self.drop_held()
        elif self.cut and looked_for.begin_with(self.text[self.at :]):
            self._drop_rest()
        else:
            self.give_back()

    def no_call(self, begun: str) -> None:
        """No call has come of what is held. begun: the text that opened it; if the text was cut behind that, it is
        notation, but for a word, which may be any text's."""
        if self.cut and begun and not "".join(self._held or ()).strip().isalpha():
            self._drop_rest()
        else:
            self.give_back()

    def _drop_rest(self) -> None:
        """What is held, and what was waited for behind it, are notation."""
        self.advance(len(self.text))
        self._held = None

    def content(self, text: str) -> None:
        """Show content. Spaces beside calls and behind reasoning are the notation's: they wait for what follows."""
        if self._calls_alone:
            return
        body = text.rstrip()
        if body:
            shown = "".join((*self._spaces, body))
            self._deltas.append(ContentDelta(shown.lstrip() if self._strip else shown))
            self._strip, self._shown, self._spaces = False, True, []
        self._spaces.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        """Show reasoning, without the spaces around it."""
        body = text.rstrip()
        if body:
            shown = "".join((*self._thought_spaces, body))
            self._deltas.append(ReasoningDelta(shown if self._thought else shown.lstrip()))
            self._thought, self._thought_spaces = True, []
        self._thought_spaces.append(text[len(body) :])

    def end_reasoning(self) -> None:
        """What follows is content, without the spaces before it."""
        self._thought_spaces, self._strip = [], True

    def begin_part(self, reasoning: bool) -> None:
        """More of what has been shown comes, after something else: a line is left between the two."""
        if reasoning and self._thought:
            self._thought_spaces.append("\n\n")
        elif not reasoning and self._shown:
            self._spaces.append("\n\n")

    def begin_call(self, name: str) -> Callable[[str], None]:
        """A call begins, and nothing of it is held any more -> what takes its arguments' text."""
        self._held = None
        place, self.calls = self.calls, self.calls + 1
        if not self._shown:
            self._spaces, self._strip = [], True
        if self._most_calls is not None and place >= self._most_calls:
            return _drop
        self._deltas.append(CallBegin(place, self._call_id(place), name))
        return lambda text: self._deltas.append(ArgumentsDelta(place, text)) if text else None

    def end_content(self) -> None:
        """The text has ended."""
        spaces = "".join(self._spaces)
        if spaces and not self.calls and not self._strip:
            self._deltas.append(ContentDelta(spaces))
        self._spaces = []


def _drop(text: str) -> None:
    """Of a call that is one too many."""


_DONE = object()


class ReadingParser:
    """A MessageParser made of a generator that reads the whole text."""

    def __init__(self, reader: TextReader, reading: Reading[None]) -> None:
        self._reader = reader
        self._reading: Reading[None] | None = reading

    def feed(self, text: str) -> list[Delta]:
        """What more text says, as far as nothing that follows can change it. ValueError after the end."""
        if self._reader.ended:
            raise ValueError("the text has ended")
        self._reader.add(text)
        self._advance()
        return self._reader.take()

    def finish(self, cut: bool = False) -> list[Delta]:
        """As MessageParser has it."""
        if not self._reader.ended:
            self._reader.ended, self._reader.cut = True, cut
            self._advance()
            self._reader.end_content()
        return self._reader.take()

    def _advance(self) -> None:
        if self._reading is not None and next(self._reading, _DONE) is _DONE:
            self._reading = None
