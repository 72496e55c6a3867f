"""Structural tags: free text with shaped parts, or a whole answer made of texts, schemas, patterns and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.argument_notations import PythonArguments, XmlParameters
from quire.platform.sampling.structured.constraint import CompiledConstraint, Trigger
from quire.platform.sampling.structured.grammars import lark_of
from quire.platform.sampling.structured.json_schema.compiler import schema_rule
from quire.platform.sampling.structured.json_schema.rules import NEVER, Expr, Grammar, Ref, choice, repeated, sequence
from quire.platform.sampling.structured.json_schema.texts import is_empty, regex_of_text
from quire.platform.sampling.structured.json_schema.writer import Notation, Spacing
from quire.platform.sampling.structured.regexes import regex_expression

MAX_NESTING = 32  # formats within each other
MAX_FORMATS = 10_000  # formats in all
MAX_TEXT_LENGTH = 65_536  # characters of a text that is to be generated
_ANY = "(?s:.)*"
# JSON's own tokens within a text: what else may stand there begins with the same ones.
_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[:,] ?|[^"{}\[\]:,]+|"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a Lark expression of a terminal matches."""

    expression: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text, up to the text that follows it."""


class PlacedError(RequestError):
    """About a schema that has a place of its own in the request: the message begins with that."""


Part = Text | Pattern | AnyText | Expr


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes have in common: how JSON is spaced, and the special tokens by their texts."""

    spacing: Spacing
    close_objects: bool
    special: Mapping[str, int]


def compile_structural_tag(given: str | Mapping[str, Any], options: Options) -> CompiledConstraint:
    """What a structural tag asks for. Raises RequestError naming the place of what is wrong or cannot be enforced."""
    format = format_of(given)
    kind = format.get("type") if isinstance(format, Mapping) else None
    if kind == "triggered_tags":
        return _free_text(format, options, [])
    if kind == "sequence" and isinstance(format.get("elements"), list) and format["elements"]:
        *first, last = format["elements"]
        if isinstance(last, Mapping) and last.get("type") == "triggered_tags":
            return _free_text(last, options, first)
    builder = _Builder(options)
    return CompiledConstraint(grammar=builder.finish(builder.parts(format, "format", 0)))


def format_of(given: str | Mapping[str, Any]) -> Any:
    """What a structural tag's `format` is, in either of its forms. Raises RequestError for what is none."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise RequestError("structural_tag: it is no JSON.") from None
    if not isinstance(given, Mapping):
        raise RequestError(f"structural_tag: it is an object, not {type(given).__name__}.")
    if given.get("type", "structural_tag") != "structural_tag":
        raise RequestError(f"structural_tag: its type is {given['type']!r}, and has to be 'structural_tag'.")
    _only(given, "structural_tag", ("type", "format", "structures", "triggers"))
    if "format" in given:
        return given["format"]
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, Sequence) or isinstance(structures, str) or not isinstance(triggers, Sequence):
        raise RequestError("structural_tag: it has a format, or lists of structures and triggers.")
    tags = []
    for place, one in enumerate(structures):
        if not isinstance(one, Mapping):
            raise RequestError(f"structural_tag: structures[{place}] is an object with begin, schema and end.")
        _only(one, f"structures[{place}]", ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}


def _only(given: Mapping[str, Any], where: str, names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names:
            raise RequestError(f"structural_tag: {where}: {name!r} is not known; it has {', '.join(names)}.")


def _free_text(format: Mapping[str, Any], options: Options, first: list[Any]) -> CompiledConstraint:
    """Free text with tags; what has to come first is a grammar."""
    triggers, tags, at_least_one, stop = _triggered(format, "format")
    builder = _Builder(options)
    parts = builder.all(first, "format.elements", 0)
    if at_least_one:
        parts.append(choice(builder.expr(builder.parts(tag, "format.tags", 1)) for tag in tags))
    grammar = builder.finish(parts) if parts else None
    if at_least_one and stop:
        return CompiledConstraint(grammar=grammar)
    compiled = []
    for trigger in triggers:
        rest = _Builder(options)
        found = [tag for tag in tags if tag["begin"].startswith(trigger)]
        if found:
            options_ = [rest.expr(rest.tag(tag, "format.tags", 1, skip=len(trigger))) for tag in found]
            compiled.append(Trigger(trigger, rest.finish([choice(options_)])))
    return CompiledConstraint(grammar=grammar, triggers=tuple(compiled), stop_after_first=stop)


def _triggered(format: Mapping[str, Any], where: str) -> tuple[list[str], list[Any], bool, bool]:
    """Its triggers, tags, at_least_one and stop_after_first, checked."""
    _only(format, where, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
    triggers, tags = format.get("triggers"), format.get("tags")
    if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers) or not triggers:
        raise RequestError(f"structural_tag: {where}.triggers is a list of texts.")
    if not isinstance(tags, list) or not tags or not all(isinstance(tag, Mapping) for tag in tags):
        raise RequestError(f"structural_tag: {where}.tags is a list of tags.")
    # Where one begins with another, that comes first.
    kept = [one for one in dict.fromkeys(triggers) if not any(one != o and one.startswith(o) for o in triggers)]
    for place, tag in enumerate(tags):
        begin = tag.get("begin")
        if not isinstance(begin, str) or not any(begin.startswith(one) for one in kept):
            raise RequestError(f"structural_tag: {where}.tags[{place}]: begin {begin!r} begins with no trigger.")
    return kept, tags, _flag(format, "at_least_one", where), _flag(format, "stop_after_first", where)


def _flag(format: Mapping[str, Any], name: str, where: str) -> bool:
    value = format.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"structural_tag: {where}.{name} is true or false.")
    return value


@dataclass
class _Builder:
    """One grammar in the making."""

    options: Options
    grammar: Grammar = field(default_factory=Grammar)
    own: list[str] = field(default_factory=list)  # grammars that requests write
    schemas: dict[int, Expr] = field(default_factory=dict)  # by the format: a tag may stand in several places
    count: int = 0

    def finish(self, parts: list[Part]) -> str:
        """The grammar of these parts, as LLMatcher takes it."""
        start = self.grammar.rule(sequence(self.expr(parts)))
        name = start.name if isinstance(start, Ref) and start.name in self.grammar.rules else ""
        if not name:
            name = self.grammar.new_name()
            self.grammar.rules[name] = start
        text = self.grammar.text(name)
        if text is None:
            raise RequestError("structural_tag: no text fits it.")
        if not self.own:
            return text
        named = [{"name": f"g{place}", "lark_grammar": lark} for place, lark in enumerate(self.own)]
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": text}, *named]})

    def all(self, formats: Any, where: str, depth: int) -> list[Part]:
        """What stands one behind the other."""
        if not isinstance(formats, Sequence) or isinstance(formats, str):
            raise RequestError(f"structural_tag: {where} is a list of formats.")
        return [part for place, one in enumerate(formats) for part in self.parts(one, f"{where}[{place}]", depth + 1)]

    def parts(self, format: Any, where: str, depth: int) -> list[Part]:
        """What a format comes to."""
        self.count += 1
        if depth > MAX_NESTING or self.count > MAX_FORMATS:
            raise RequestError(
                f"structural_tag: {where}: more than {MAX_NESTING} formats within each other, or {MAX_FORMATS:,} in "
                "all: the limits."
            )
        kind = format.get("type") if isinstance(format, Mapping) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise RequestError(f"structural_tag: {where}.type is one of {', '.join(_KINDS)}, not {kind!r}.")
        method, names = _KINDS[kind]
        _only(format, where, ("type", *names))
        try:
            return method(self, format, where, depth)
        except PlacedError:
            raise
        except RequestError as error:
            said = str(error)
            raise (
                error if said.startswith("structural_tag:") else RequestError(f"structural_tag: {where}: {said}")
            ) from None

    def text(self, text: Any, where: str) -> list[Part]:
        """A text, in which special tokens are themselves."""
        if not isinstance(text, str):
            raise RequestError(f"structural_tag: {where} is a text.")
        if len(text) > MAX_TEXT_LENGTH:
            raise RequestError(
                f"structural_tag: {where} has {len(text):,} characters; {MAX_TEXT_LENGTH:,} is the limit."
            )
        special = sorted((one for one in self.options.special if one and one in text), key=len, reverse=True)
        if not special:
            return [Text(text)] if text else []
        found: list[Part] = []
        for piece in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
            if piece in self.options.special:
                found.append(self.grammar.special(self.options.special[piece]))
            elif piece:
                found.append(Text(piece))
        return found

    def const(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return self.text(format.get("value"), f"{where}.value")

    def schema(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return [self._schema(format, where)]

    def _schema(self, format: Mapping[str, Any], where: str, notation: Notation | None = None) -> Expr:
        if "json_schema" not in format:
            raise RequestError(f"structural_tag: {where}.json_schema is missing.")
        if id(format) in self.schemas:
            return self.schemas[id(format)]
        options, place = self.options, format.get("place")
        if not isinstance(place, str | None):
            raise RequestError(f"structural_tag: {where}.place is a text.")
        spacing = Spacing(compact=options.spacing.compact) if notation else options.spacing
        try:
            rule = schema_rule(
                format["json_schema"], self.grammar, spacing, close_objects=options.close_objects, notation=notation
            )
        except RequestError as error:
            if not place:
                raise
            raise PlacedError(f"{place}: {error}") from None
        self.schemas[id(format)] = rule
        return rule

    def python(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return [self._schema(format, where, PythonArguments().notation)]

    def xml(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return [self._schema(format, where, XmlParameters(format, where).notation)]

    def regex(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        pattern = format.get("pattern")
        if not isinstance(pattern, str):
            raise RequestError(f"structural_tag: {where}.pattern is a text.")
        return [Pattern(regex_expression(pattern))]

    def lark(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        given = format.get("grammar")
        if not isinstance(given, str):
            raise RequestError(f"structural_tag: {where}.grammar is a text.")
        self.own.append(lark_of(given))
        return [Ref(f"@g{len(self.own) - 1}")]

    def any_text(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return [AnyText()]

    def sequence(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        return self.all(format.get("elements"), f"{where}.elements", depth)

    def either(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        elements = format.get("elements")
        if not isinstance(elements, list) or not elements:
            raise RequestError(f"structural_tag: {where}.elements is a list of formats.")
        found = [self.parts(one, f"{where}.elements[{place}]", depth + 1) for place, one in enumerate(elements)]
        return found[0] if len(found) == 1 else [choice(map(self.expr, found))]

    def tag(self, format: Mapping[str, Any], where: str, depth: int, skip: int = 0) -> list[Part]:
        """skip: characters of its beginning that stand there already."""
        _only(format, where, ("type", "begin", "content", "end"))
        begin = format.get("begin")
        if not isinstance(begin, str):
            raise RequestError(f"structural_tag: {where}.begin is a text.")
        content = self.parts(format.get("content"), f"{where}.content", depth + 1)
        ends = format.get("end")
        if isinstance(ends, list) and ends:
            closing: list[Part] = [choice(self.expr(self.text(one, f"{where}.end")) for one in ends)]
        else:
            closing = self.text(ends, f"{where}.end")
        return [*self.text(begin[skip:], f"{where}.begin"), *content, *closing]

    def triggered(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        """Within a grammar: text up to a trigger, and what follows that."""
        triggers, tags, at_least_one, stop = _triggered(format, where)
        free = " & ".join(f"~/{_ANY}{regex_of_text(one)}{_ANY}/" for one in triggers)
        calls = []
        for trigger in triggers:
            rests = [
                self.tag(tag, f"{where}.tags", depth + 1, len(trigger))
                for tag in tags
                if tag["begin"].startswith(trigger)
            ]
            if rests:
                before = self.expr([AnyText(), *self.text(trigger, where)])
                calls.append(sequence(before, choice(map(self.expr, rests))))
        tag_ = choice(calls)
        first = [choice(self.expr(self.parts(tag, f"{where}.tags", depth + 1)) for tag in tags)] if at_least_one else []
        more = repeated(tag_, 0, 1 if stop else None)
        if stop and at_least_one:
            return list(first)
        return [sequence(*first, more, repeated(self.grammar.terminal(f"/{_ANY}/ & {free}"), 0, 1))]

    def separated(self, format: Mapping[str, Any], where: str, depth: int) -> list[Part]:
        tags = format.get("tags")
        if not isinstance(tags, list) or not tags:
            raise RequestError(f"structural_tag: {where}.tags is a list of tags.")
        found = [self.parts(one, f"{where}.tags[{place}]", depth + 1) for place, one in enumerate(tags)]
        separator = self.text(format.get("separator", ""), f"{where}.separator")
        # The separator is a terminal with what follows it: what may come in its stead may begin like it.
        first = self.grammar.rule(choice(self.expr(one) for one in found))
        later = self.grammar.rule(choice(self.expr([*separator, *one]) for one in found))
        most = 0 if _flag(format, "stop_after_first", where) else None
        return [repeated(sequence(first, repeated(later, 0, most)), int(_flag(format, "at_least_one", where)), 1)]

    def expr(self, parts: list[Part]) -> Expr:
        """Parts as one expression: texts and patterns that stand together are terminals together."""
        found: list[Expr] = []
        run: list[Text | Pattern | AnyText] = []
        for part in parts:
            if isinstance(part, Text | Pattern | AnyText):
                run.append(part)
            else:
                found += self._terminals(run, before=part)
                found.append(part)
                run = []
        return sequence(*found, *self._terminals(run))

    def _terminals(self, run: list[Text | Pattern | AnyText], before: Expr | None = None) -> list[Expr]:
        if not run:
            return []
        if all(isinstance(part, Text) for part in run):
            text = "".join(part.text for part in run if isinstance(part, Text))
            if not ("{" in text or "[" in text):
                return [self._literal(text)] if text else []
            return [self._literal(found) for found in _JSON_TOKENS.findall(text)]
        if isinstance(run[-1], AnyText) and before is not None and not _is_special(before):
            raise RequestError("any_text is served before a text, and at the end: nothing says where this one ends")
        expressions: list[str] = []
        place = 0
        while place < len(run):
            part = run[place]
            following = run[place + 1] if place + 1 < len(run) else None
            if isinstance(part, AnyText) and isinstance(following, Text):
                end = regex_of_text(following.text)
                expressions.append(f"(/{_ANY}{end}/ & ~/{_ANY}{end}(?s:.)+/)")
                place += 1
            elif isinstance(part, AnyText):
                expressions.append(f"/{_ANY}/")
            elif isinstance(part, Text):
                expressions.append(f"/{regex_of_text(part.text)}/")
            else:
                expressions.append(f"({part.expression})")
            place += 1
        expression = " ".join(expressions)
        if is_empty(expression):
            return [NEVER]
        return [self.grammar.terminal(expression)]

    def _literal(self, text: str) -> Expr:
        return self.grammar.terminal(f"/{regex_of_text(text)}/")


def _is_special(expr: Expr) -> bool:
    return isinstance(expr, Ref) and expr.name.startswith("<")


_Method = Callable[[_Builder, Mapping[str, Any], str, int], list[Part]]
_KINDS: dict[str, tuple[_Method, tuple[str, ...]]] = {
    "const_string": (_Builder.const, ("value",)),
    "json_schema": (_Builder.schema, ("json_schema", "place")),
    "pythonic_arguments": (_Builder.python, ("json_schema", "place")),
    "xml_parameters": (_Builder.xml, ("json_schema", "place", "key", "value", "separator")),
    "regex": (_Builder.regex, ("pattern",)),
    "grammar": (_Builder.lark, ("grammar",)),
    "any_text": (_Builder.any_text, ()),
    "sequence": (_Builder.sequence, ("elements",)),
    "or": (_Builder.either, ("elements",)),
    "tag": (_Builder.tag, ("begin", "content", "end")),
    "triggered_tags": (_Builder.triggered, ("triggers", "tags", "at_least_one", "stop_after_first")),
    "tags_with_separator": (_Builder.separated, ("tags", "separator", "at_least_one", "stop_after_first")),
}
