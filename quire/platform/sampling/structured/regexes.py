"""Regular expressions and choices as grammars."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.texts import is_empty, regex_of_text
from quire.platform.sampling.structured.pattern_writing import whole_texts, widened, written
from quire.platform.sampling.structured.patterns import Choice, parse

MAX_CHOICES = 200_000
MAX_CHOICES_LENGTH = 8_000_000  # characters of all together


def regex_expression(pattern: str, what: str = "regex") -> str:
    """A Lark expression of the texts that a pattern matches from their beginning to their end.

    Raises RequestError for what is not served, and for a pattern that no text matches.
    """
    try:
        node = widened(whole_texts(parse(pattern), search=False))
    except RequestError as error:
        raise RequestError(f"{what}: {error}") from None
    if node == Choice(()) or is_empty(expression := f"/{written(node)}/"):
        raise RequestError(f"{what}: no text matches {pattern[:80]!r}.")
    return expression


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a pattern matches as a whole."""
    return f"start: T0\nT0: {regex_expression(pattern)}\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of one of some texts. Raises RequestError for none, too many, and for what is no text."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError("choice: it is a list of texts, of one at least.")
    if not all(isinstance(one, str) and one for one in choices):
        raise RequestError("choice: each is a text that is not empty.")
    length = sum(map(len, choices))
    if len(choices) > MAX_CHOICES or length > MAX_CHOICES_LENGTH:
        raise RequestError(
            f"choice: {len(choices):,} texts with {length:,} characters; the limits are {MAX_CHOICES:,} and "
            f"{MAX_CHOICES_LENGTH:,}."
        )
    if any("\ud800" <= char <= "\udfff" for one in choices for char in one):
        raise RequestError("choice: half a surrogate pair is no character, and cannot be generated.")
    return f"start: T0\nT0: /{'|'.join(map(regex_of_text, dict.fromkeys(choices)))}/\n"
