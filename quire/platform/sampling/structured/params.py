"""What an answer is to look like: vLLM's `StructuredOutputsParams`, checked on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_TEXTS = ("regex", "grammar", "whitespace_pattern", "after", "opens")
_SWITCHES = ("json_object", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """The shape of one request's answers. Exactly one of the first six is given.

    json: a JSON schema, as a dict, a bool or a text, or a pydantic model's class.  regex: what the whole answer
        matches.  choice: the answer is one of these texts.  grammar: in Lark's notation, or in GBNF or EBNF.
    json_object: True: any JSON object.
    structural_tag: free text with shaped parts, as a dict or JSON text: vLLM's {"type": "structural_tag",
        "structures": [{"begin", "schema", "end"}], "triggers": [...]}, or {"type": "structural_tag", "format": {...}}.
    disable_any_whitespace: JSON without spaces and line breaks between its tokens.
    disable_additional_properties: objects have the properties that their schema names, unless it says otherwise.
    whitespace_pattern: a regex of what may stand between JSON's tokens.
    after: the shape begins behind this text, which ends the model's reasoning; what comes before it is free.
    opens: of free text with shaped parts alone: `after` is awaited only where the answer begins with this text, white
        space aside, which begins the model's reasoning.

    Raises RequestError for none or several shapes, and for values of other types.
    """

    json: str | bool | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after: str | None = None
    opens: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        given = [name for name in KINDS if getattr(self, name) not in (None, False) or self._is_false_schema(name)]
        if len(given) != 1:
            told = f"{' and '.join(given)} are given" if given else "none is given"
            raise RequestError(f"structured_outputs takes exactly one of {', '.join(KINDS)}; {told}.")

    def _check_types(self) -> None:
        """Before anything else: 0 would be taken for False. json and choice are looked at where they are compiled."""
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs {name}: it is a text, not {_kind(value)}.")
        for name in _SWITCHES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"structured_outputs {name}: it is true or false, not {_kind(value)}.")
        for name, kind in (
            ("structural_tag", "an object or a text"),
            ("choice", "a list of texts"),
            ("json", "a schema"),
        ):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not (name == "json" and isinstance(value, bool)):
                raise RequestError(f"structured_outputs {name}: it is {kind}, not {_kind(value)}.")

    def _is_false_schema(self, name: str) -> bool:
        return name == "json" and self.json is False


def _kind(value: object) -> str:
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class ReasoningTexts:
    """Which texts begin and end what a model thinks before it answers.

    ends: the first of them is the usual one. begun: the prompt has begun it; else it is looked for at the beginning of
    the answer.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    begun: bool = False

    def __post_init__(self) -> None:
        if not self.ends or not all((*self.begins, *self.ends)):
            raise RequestError("reasoning: a text that ends it is needed, and none is empty.")
