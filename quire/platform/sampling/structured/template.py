"""A constraint with its grammars compiled: what a sequence's state begins as a copy of."""

from __future__ import annotations

from enum import Enum

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.platform.sampling.structured.constraint import CompiledConstraint
from quire.platform.sampling.structured.vocabulary import Vocabulary

# What one token may cost at most: a grammar that asks for more ends its request, before it holds up a step. A thousand
# items take some 5 ms. A lexer's state takes some 350 bytes, which stay with the template.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=60_000,
    step_max_items=8_000,
    max_items_in_row=10_000,
    max_lexer_states=30_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MOST_RENEWED = 16_384  # characters of a grammar that is compiled within a step: some milliseconds
_LONGEST_ERROR = 300  # characters of llguidance's words that an error repeats


class Stage(Enum):
    """Where an answer is: where `opens` may stand; in free text before `after`, or that triggers may follow; in the
    grammar, or in that of a trigger; past its end."""

    OPENING = 0
    BEFORE = 1
    FREE = 2
    GRAMMAR = 3
    TAG = 4
    ENDED = 5

    @property
    def matches(self) -> bool:
        """A grammar is in force."""
        return self is Stage.GRAMMAR or self is Stage.TAG


class Template:
    """The compiled form of a constraint over a vocabulary. Any number of sequences share it.

    begins: the stage of an empty answer.
    is_worn: a limit was reached. Copies of a matcher share its lexer, which keeps the states that any answer has come
        by: what one answer may not reach, many together may. The next request has it compiled anew; those that are
        under way get a lexer of their own.
    Raises RequestError for a grammar that llguidance refuses.
    """

    def __init__(self, constraint: CompiledConstraint, vocabulary: Vocabulary) -> None:
        self.constraint = constraint
        self.vocabulary = vocabulary
        self.is_worn = False
        self._grammar = None if constraint.grammar is None else _compile(constraint.grammar, vocabulary)
        self._tags = [_compile(trigger.grammar, vocabulary) for trigger in constraint.triggers]
        self._texts = {
            Stage.BEFORE: () if constraint.after is None else (constraint.after.encode(),),
            Stage.FREE: tuple(trigger.text.encode() for trigger in constraint.triggers),
        }
        self.longest = max((len(text) for texts in self._texts.values() for text in texts), default=0)
        self._banned: dict[tuple[Stage, int, int], NDArray[np.int64]] = {}
        self.opens = (constraint.opens or "").encode()
        self.begins = self.behind_after
        if constraint.after is not None:
            self.begins = Stage.OPENING if self.opens else Stage.BEFORE
        self.ends_lazily = {
            Stage.GRAMMAR: bool(constraint.triggers),
            Stage.TAG: not constraint.stop_after_first,
        }
        for stage, texts in self._texts.items():
            for place in range(len(texts)):
                self._bans(stage, place, 0)

    @property
    def behind_after(self) -> Stage:
        """The stage behind `after`."""
        return Stage.FREE if self._grammar is None else Stage.GRAMMAR

    def matcher(self, stage: Stage, place: int = 0) -> LLMatcher:
        """A matcher of what comes in a stage. place: of the trigger."""
        matcher = self._grammar if stage is Stage.GRAMMAR else self._tags[place]
        assert matcher is not None
        return matcher.deep_copy()

    def own_matcher(self, stage: Stage, place: int = 0) -> LLMatcher | None:
        """The same with a lexer that no other answer has used; None for a grammar that takes long to compile."""
        constraint = self.constraint
        grammar = constraint.grammar if stage is Stage.GRAMMAR else constraint.triggers[place].grammar
        assert grammar is not None
        return _matcher(grammar, self.vocabulary) if len(grammar) <= _MOST_RENEWED else None

    def find(self, stage: Stage, tail: bytes, piece: bytes) -> tuple[int, bytes] | None:
        """(place, what comes behind it) of the text that ends first in tail + piece; tail alone has none."""
        text, best = tail + piece, None
        for place, wanted in enumerate(self._texts[stage]):
            at = text.find(wanted)
            if at >= 0 and (best is None or (at + len(wanted), at) < best[0]):
                best = (at + len(wanted), at), place
        return None if best is None else (best[1], text[best[0][0] :])

    def fits(self, stage: Stage, place: int, rest: bytes) -> bool:
        """Whether what a token has behind a text may stand there."""
        if stage is Stage.BEFORE and self._grammar is None:
            return True  # free text
        matcher = self.matcher(Stage.GRAMMAR if stage is Stage.BEFORE else Stage.TAG, place)
        if read_text(matcher, self.vocabulary, rest) == b"":
            return not matcher.is_error()
        if stage is Stage.BEFORE:
            return not rest.strip()  # a line's end behind the reasoning belongs to that
        return matcher.is_accepting() and self.ends_lazily[Stage.TAG]

    def banned(self, stage: Stage, tail: bytes) -> NDArray[np.int64] | None:
        """The tokens that would run past the end of a text that begins here in a way that may not follow it."""
        found = []
        for place, wanted in enumerate(self._texts[stage]):
            found.append(self._bans(stage, place, 0))
            for length in range(1, min(len(wanted) - 1, len(tail)) + 1):
                if tail.endswith(wanted[:length]):
                    found.append(self._bans(stage, place, length))
        found = [one for one in found if len(one)]
        return None if not found else found[0] if len(found) == 1 else np.concatenate(found)

    def _bans(self, stage: Stage, place: int, length: int) -> NDArray[np.int64]:
        """The tokens that may not come where the first `length` bytes of a text stand."""
        bans = self._banned.get((stage, place, length))
        if bans is None:
            wanted = self._texts[stage][place]
            vocabulary = self.vocabulary
            if length:
                rest = wanted[length:]
                rests = [(one, vocabulary.bytes_of(one)[len(rest) :]) for one in vocabulary.beginning_with(rest)]
            else:
                rests = [(one, vocabulary.bytes_of(one).partition(wanted)[2]) for one in vocabulary.containing(wanted)]
            bad = [one for one, behind in rests if not self.fits(stage, place, behind)]
            bans = self._banned[stage, place, length] = np.array(bad, np.int64)
        return bans


def read_text(matcher: LLMatcher, vocabulary: Vocabulary, text: bytes) -> bytes:
    """Have a matcher read a text as far as it can; what is left of it."""
    if not text:
        return b""
    ids = vocabulary.tokenizer.tokenize_bytes(text)
    read = matcher.try_consume_tokens(ids)
    return b"".join(vocabulary.bytes_of(one) for one in ids[read:])


def _matcher(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    return LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=_LIMITS)


def _compile(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """Raises RequestError for what llguidance refuses, and where the first token alone would be too much."""
    matcher = _matcher(grammar, vocabulary)
    if not matcher.is_error():
        first = matcher.deep_copy()
        first.compute_bitmask()
        if not first.is_error():
            return matcher
        matcher = first
    raise RequestError(f"structured_outputs: {told(matcher)}")


def told(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, in one line."""
    text = " ".join(matcher.get_error().split())
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
