"""Context-free grammars that requests write: in Lark's notation as llguidance has it, or in GBNF (and EBNF like it)."""

from __future__ import annotations

import re

from llguidance import LLMatcher

from quire.errors import RequestError
from quire.platform.sampling.structured.gbnf import gbnf_as_lark
from quire.platform.sampling.structured.json_schema.texts import byte_tokenizer

MAX_GRAMMAR_LENGTH = 262_144  # characters
MAX_RULES_IN_A_LINE = 5000  # a stack of 8 MiB takes some 2,000, that of a thread that compiles more
_LONGEST_ERROR = 400
# Texts, patterns and comments, in which nothing is looked for.
_SKIPPED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|\[(?:[^\]\\\n]|\\.)*\]|(?:#|//)[^\n]*')
_DEFINES = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w-]*\s*::=")
_LARK_RULE = re.compile(r"(?m)^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\[[^\]\n]*\]|\.-?\d+|::\w+)*[ \t]*:(?!:)")
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_OPTIONS = re.compile(r"\[[^\]\n]*\b(temperature|max_tokens|stop|stop_capture)\b[^\]\n]*\][ \t]*:")


def is_gbnf(text: str) -> bool:
    """Whether rules are defined with ::=, as in GBNF and EBNF; Lark defines them with a colon."""
    return _DEFINES.search(_SKIPPED.sub(" ", text)) is not None


def lark_of(text: str) -> str:
    """A grammar as Lark. Raises RequestError with the line of what is wrong."""
    if not isinstance(text, str) or not text.strip():
        raise RequestError("grammar: it is a text, and not empty.")
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise RequestError(f"grammar: it has {len(text):,} characters; the limit is {MAX_GRAMMAR_LENGTH:,}.")
    if is_gbnf(text):
        return gbnf_as_lark(text)
    found = _OPTIONS.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise RequestError(f"grammar: line {line}: the option {found[1]!r} is not served: use the request's own.")
    _check_lines(text)
    return text


def _check_lines(text: str) -> None:
    """Rules that lead to each other in a line are followed one deeper than the other, and a stack has an end."""
    plain = _SKIPPED.sub(" ", text)
    found = list(_LARK_RULE.finditer(plain))
    uses: dict[str, list[str]] = {}
    for place, one in enumerate(found):
        end = found[place + 1].start() if place + 1 < len(found) else len(plain)
        uses.setdefault(one[1], []).extend(dict.fromkeys(_WORD.findall(plain, one.end(), end)))
    seen: set[str] = set()
    for name in uses:
        path = [(name, iter(uses[name]))] if name not in seen else []
        seen.add(name)
        while path:
            following = next((one for one in path[-1][1] if one in uses and one not in seen), None)
            if following is None:
                path.pop()
                continue
            seen.add(following)
            path.append((following, iter(uses[following])))
            if len(path) > MAX_RULES_IN_A_LINE:
                raise RequestError(
                    f"grammar: more than {MAX_RULES_IN_A_LINE} rules lead to each other in a line, the limit: "
                    "put some of them together."
                )


def grammar_of(text: str) -> str:
    """The same, checked."""
    lark = lark_of(text)
    error = LLMatcher.validate_grammar(lark)
    if error and not error.startswith("WARNING"):
        said = " ".join(error.split())
        raise RequestError(f"grammar: {said[:_LONGEST_ERROR]}")
    matcher = LLMatcher(byte_tokenizer(), lark, log_level=0)
    if not matcher.is_error() and not any(matcher.compute_bitmask()[:32]) and not matcher.is_accepting():
        raise RequestError("grammar: no text fits it.")
    return lark
