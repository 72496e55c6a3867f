"""Which texts a schema allows, as a regular expression of how JSON spells them."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.facts import Facts
from quire.platform.sampling.structured.json_schema.formats import FORMATS
from quire.platform.sampling.structured.pattern_writing import whole_texts, widened, written
from quire.platform.sampling.structured.patterns import ANY, Choice, Set, parse

MAX_PATTERNS = 6  # of one text: what matches all of them can be a very large machine

# Any spelling: short escapes, and those of any character by its number (a pair of them beyond the first 65,536).
_HEX = "[0-9a-fA-F]"
_CODE = rf"[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
ANY_STRING = rf'/"(?:[^"\\\x00-\x1f]|\\(?:["\\\/bfnrt]|u(?:{_CODE})))*"/'
# One spelling a text: no escape where none is needed.
_SPELT = written(Set(ANY), in_json=True)


class _Bytes:
    """A tokenizer of single bytes, by which expressions are tried."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def spell(text: str) -> str:
    """A text as it is written, between quotes."""
    plain = json.dumps(text, ensure_ascii=False)
    return plain if plain.isascii() or not re.search("[\ud800-\udfff]", plain) else json.dumps(text)


def regex_of_text(text: str) -> str:
    """A regular expression of exactly this text, in what Lark takes between its slashes."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


@lru_cache(maxsize=4096)
def found_in(pattern: str, *, wide: bool) -> str | None:
    """A regular expression of the texts, spelt, in which a pattern is found; None: there are none."""
    node = widened(whole_texts(parse(pattern, wide=wide), search=True))
    return None if node == Choice(()) else '"(?:' + written(node, in_json=True) + ')"'


@lru_cache(maxsize=64)
def _of_format(name: str) -> str:
    node = whole_texts(parse(FORMATS[name]), search=False)
    return '"(?:' + written(node, in_json=True) + ')"'


def expression_of(facts: Facts) -> str | None:
    """A Lark expression of the strings; None: there are none."""
    excluded = sorted(one for one in facts.excluded if isinstance(one, str))
    if facts.max_length is not None and facts.max_length < facts.min_length:
        return None
    if len(facts.patterns) > MAX_PATTERNS:
        raise RequestError(f"json schema: more than {MAX_PATTERNS} patterns hold together of one text, the limit.")
    parts = []
    for pattern, holds in facts.patterns:
        found = found_in(pattern, wide=not holds)
        if found is None and holds:
            return None
        if found is not None:
            parts.append(f"/{found}/" if holds else f"~/{found}/")
    parts += [f"/{_of_format(name)}/" for name in dict.fromkeys(facts.formats)]
    if facts.min_length or facts.max_length is not None:
        most = "" if facts.max_length is None else facts.max_length
        parts.append(f'/"{_SPELT}{{{facts.min_length},{most}}}"/')
    if excluded:
        parts.append(f"~/{'|'.join(regex_of_text(spell(one)) for one in excluded)}/")
    if not parts:
        return ANY_STRING
    if all(part.startswith("~") for part in parts):
        parts.insert(0, f'/"{_SPELT}*"/')
    return " & ".join(sorted(parts, key=lambda part: part.startswith("~")))


def raw_expression_of(facts: Facts) -> str | None:
    """The same of the texts as they are, not as JSON spells them: any character, lines included."""
    if facts.values is not None:
        found = [regex_of_text(one) for one in facts.values if isinstance(one, str)]
        return f"/{'|'.join(found)}/" if found else None
    if facts.max_length is not None and facts.max_length < facts.min_length:
        return None
    most = "" if facts.max_length is None else facts.max_length
    parts = [f"/(?s:.){{{facts.min_length},{most}}}/"]
    for pattern, holds in facts.patterns:
        node = widened(whole_texts(parse(pattern, wide=not holds), search=True))
        if node == Choice(()) and holds:
            return None
        if node != Choice(()):
            parts.append(("" if holds else "~") + f"/{written(node)}/")
    parts += [f"/{written(whole_texts(parse(FORMATS[name]), search=False))}/" for name in dict.fromkeys(facts.formats)]
    parts += [f"~/{regex_of_text(one)}/" for one in facts.excluded if isinstance(one, str)]
    return " & ".join(parts)


# What trying an expression may cost: some 50 ms.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000, step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False
)


class Expression:
    """A Lark expression that texts can be tried with, in linear time."""

    def __init__(self, expression: str) -> None:
        self._matcher = LLMatcher(byte_tokenizer(), f"start: T\nT: {expression}", log_level=0, limits=_LIMITS)

    def empty(self) -> bool:
        """Whether it matches no text at all."""
        self._check()
        mask = self._matcher.compute_bitmask()
        if self._matcher.get_error().startswith("NoExtension"):
            return True
        self._check()
        return not any(mask[:32]) and not self._matcher.is_accepting()

    def matches(self, text: str) -> bool:
        """Whether it matches this one as a whole."""
        tokens = list(text.encode())
        self._matcher.reset()
        found = self._matcher.try_consume_tokens(tokens) == len(tokens) and self._matcher.is_accepting()
        self._check()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                "json schema: patterns, lengths and excluded texts are too large together for a grammar: "
                "make them simpler."
            )


@lru_cache(maxsize=1024)
def _expression(expression: str) -> Expression:
    return Expression(expression)


@lru_cache(maxsize=4096)
def is_empty(expression: str) -> bool:
    """Whether no text matches a Lark expression."""
    return Expression(expression).empty()


def fits_texts(facts: Facts, text: str) -> bool:
    """Whether a string is one of them."""
    if text in facts.excluded or len(text) < facts.min_length:
        return False
    if facts.max_length is not None and len(text) > facts.max_length:
        return False
    if not facts.patterns and not facts.formats:
        return True
    if re.search("[\ud800-\udfff]", text):
        return False
    expression = _said(facts.patterns, facts.formats)
    return expression is not None and _expression(expression).matches(spell(text))


@lru_cache(maxsize=256)
def _said(patterns: tuple[tuple[str, bool], ...], formats: tuple[str, ...]) -> str | None:
    return expression_of(Facts(patterns=patterns, formats=formats))


def finds(pattern: str, text: str, *, wide: bool = False) -> bool:
    """Whether a pattern is found in a text: by every reader, or by any of them (wide)."""
    found = found_in(pattern, wide=wide)
    return (
        found is not None and not re.search("[\ud800-\udfff]", text) and _expression(f"/{found}/").matches(spell(text))
    )
