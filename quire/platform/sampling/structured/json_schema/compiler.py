"""From a schema to a grammar in Lark: a rule for each set of subschemas that a value has to fit."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.arrays import array_of
from quire.platform.sampling.structured.json_schema.branches import Expander
from quire.platform.sampling.structured.json_schema.document import Document, Schema, load, refuse
from quire.platform.sampling.structured.json_schema.facts import ANYTHING, NOTHING, Facts, Node, node_of
from quire.platform.sampling.structured.json_schema.keywords import MAX_ONE_OF, NOT_BINDING
from quire.platform.sampling.structured.json_schema.numbers import expressions_of
from quire.platform.sampling.structured.json_schema.objects import object_of
from quire.platform.sampling.structured.json_schema.rules import (
    NEVER,
    Expr,
    Grammar,
    Ref,
    choice,
    sequence,
)
from quire.platform.sampling.structured.json_schema.texts import (
    expression_of,
    is_empty,
    regex_of_text,
    spell,
)
from quire.platform.sampling.structured.json_schema.writer import Layout, Members, Notation, Spacing

MAX_ALIASES = 400  # references that lead to references


def schema_grammar(schema: Any, spacing: Spacing | None = None, *, close_objects: bool = False) -> str:
    """The Lark grammar of a schema's values.

    close_objects: where a schema names properties and says nothing of others, there are none.
    Raises RequestError naming a keyword and its place for what cannot be enforced, and for a schema that nothing fits.
    """
    grammar = Grammar()
    start = schema_rule(schema, grammar, spacing, close_objects=close_objects)
    text = grammar.text(start.name)
    assert text is not None
    return text


def schema_rule(
    schema: Any,
    grammar: Grammar,
    spacing: Spacing | None = None,
    *,
    close_objects: bool = False,
    notation: Notation | None = None,
) -> Ref:
    """The same as a rule of a grammar that goes on. notation: of the outermost object, and of what is in it."""
    document = Document(load(schema))
    compiler = Compiler(document, spacing or Spacing(), grammar, close_objects=close_objects, notation=notation)
    start = compiler.compile()
    if start is None or not grammar.comes_to_an_end(start.name):
        circular = compiler.expander.circular
        if circular is not None:
            raise refuse(circular, "$ref", "it leads back to itself, and no value comes of it.")
        raise RequestError("json schema: no value fits it: its keywords contradict each other.")
    return start


class Compiler:
    """Rules by node, made one after the other."""

    def __init__(
        self,
        document: Document,
        spacing: Spacing,
        grammar: Grammar,
        *,
        close_objects: bool = False,
        notation: Notation | None = None,
    ) -> None:
        self.document, self.close_objects = document, close_objects
        self.expander = Expander(document)
        self.grammar = grammar
        self.layout = Layout(self.grammar, spacing)
        self.notation = notation or Notation()
        self._names: dict[Node, str] = {}
        self._pending: list[Node] = []
        self._current: Node = ANYTHING

    def compile(self) -> Ref | None:
        """The rule of what fits the schema; None: nothing does."""
        root = node_of((self.document.root, True))
        start = self.node(root) if self.notation.outermost is None else self._outermost(root, self.notation.outermost)
        while self._pending:
            self._current = self._pending.pop()
            self.grammar.rules[self._names[self._current]] = self._rule(self._current)
        return start if isinstance(start, Ref) else None

    def _outermost(self, node: Node, members: Members) -> Expr:
        """The rule of the objects that fit a node, their properties written in a way of their own."""
        self._current = node
        name = self.grammar.new_name()
        found = [facts for facts in self.expander.branches(node) if "object" in facts.kinds]
        self.grammar.rules[name] = choice(object_of(self, facts, members) for facts in found)
        return Ref(name)

    def node(self, node: Node) -> Expr:
        """The rule of what fits a node."""
        if node == NOTHING:
            return NEVER
        node = self._without_aliases(node)
        if node not in self._names:
            self._names[node] = self.grammar.new_name()
            self._pending.append(node)
        return Ref(self._names[node])

    def _without_aliases(self, node: Node) -> Node:
        """References that say nothing beside are what they lead to."""
        wanted = []
        for schema, holds in node:
            for _ in range(MAX_ALIASES):
                said = _binding(schema)
                if said != {"$ref"}:
                    break
                schema = self.document.resolve(schema, "$ref")
            wanted.append((schema, holds))
        return node_of(*wanted)

    def where(self, facts: Facts, keyword: str) -> Schema:
        """A schema that the rule at work is about, if possible one with the keyword."""
        schemas = [facts.count_at] if facts.count_at is not None else []
        schemas += sorted((schema for schema, _ in self._current), key=lambda one: one.pointer)
        for schema in schemas:
            if isinstance(schema.value, dict) and keyword in schema.value:
                return schema
        return schemas[0] if schemas else self.document.root

    def _rule(self, node: Node) -> Expr:
        union = self._union(node)
        if union is not None:
            return choice(self.node(node_of((one, True))) for one in union)
        options: list[Expr] = []
        for facts in self.expander.branches(node):
            options += self.options(facts)
        return choice(options)

    def _union(self, node: Node) -> list[Schema] | None:
        """The alternatives, if the node is nothing else: each is a rule of its own."""
        if len(node) != 1:
            return None
        ((schema, holds),) = node
        said = _binding(schema)
        if not holds or not isinstance(schema.value, dict) or said not in ({"anyOf"}, {"oneOf"}):
            return None
        keyword = "anyOf" if said == {"anyOf"} else "oneOf"
        listed = schema.value[keyword]
        if not isinstance(listed, list) or not listed:
            return None
        schemas = [self.document.child(schema, keyword, place) for place in range(len(listed))]
        if keyword == "oneOf":
            if len(schemas) > MAX_ONE_OF:
                return None
            pairs = ((one, other) for place, one in enumerate(schemas) for other in schemas[:place])
            if any(one is other or self.expander.overlap(one, other) for one, other in pairs):
                return None
        return schemas

    def options(self, facts: Facts) -> list[Expr]:
        """What the facts hold of, kind by kind."""
        if facts.values is not None:
            return [self.values(facts.values)]
        options: list[Expr] = []
        if "null" in facts.kinds:
            options.append(self.value(None))
        if "boolean" in facts.kinds:
            left = [one for one in (True, False) if not any(one is other for other in facts.excluded)]
            options += [self.value(one) for one in left]
        if facts.kinds & {"integer", "fraction"}:
            options += self._numbers(facts)
        if "string" in facts.kinds:
            options.append(self._strings(facts))
        if "array" in facts.kinds:
            options.append(array_of(self, facts))
        if "object" in facts.kinds:
            options.append(object_of(self, facts))
        return options

    def _numbers(self, facts: Facts) -> list[Expr]:
        try:
            expressions = expressions_of(facts.numbers())
        except RequestError as error:
            keyword = "multipleOf" if facts.divisors or facts.not_divisors else ""
            raise refuse(self.where(facts, keyword), keyword, f"{error}.") from None
        found: list[Expr] = []
        for expression in expressions:
            if expression.startswith("%json"):
                found.append(self.grammar.schema(expression))
            elif "&" not in expression or not is_empty(expression):
                found.append(self.grammar.terminal(expression))
        return found

    def _strings(self, facts: Facts) -> Expr:
        expression = expression_of(facts)
        if expression is None or (("&" in expression or "~" in expression) and is_empty(expression)):
            return NEVER
        return self.grammar.terminal(expression)

    def text(self, text: str) -> Expr:
        """Exactly this string."""
        return self.grammar.terminal(f"/{regex_of_text(spell(text))}/")

    def values(self, values: list[Any]) -> Expr:
        """One of these."""
        plain = [self._plain_text(value) for value in values if not isinstance(value, list | dict)]
        options: list[Expr] = [self.grammar.terminal("/" + "|".join(plain) + "/")] if plain else []
        options += [self.value(value) for value in values if isinstance(value, list | dict)]
        return choice(options)

    def value(self, value: Any) -> Expr:
        """Exactly this value."""
        layout = self.layout
        if isinstance(value, list):
            elements = [self.value(one) for one in value]
            return sequence(layout.open_array, *_joined(elements, layout.comma), layout.close_array)
        if isinstance(value, dict):
            members = [sequence(self.text(name), layout.colon, self.value(one)) for name, one in value.items()]
            return sequence(layout.open_object, *_joined(members, layout.comma), layout.close_object)
        return self.grammar.terminal(f"/{self._plain_text(value)}/")

    def _plain_text(self, value: Any) -> str:
        """A regular expression of how a value that is no array or object is written."""
        if isinstance(value, str):
            return regex_of_text(spell(value))
        if value is None or isinstance(value, bool):
            return self.notation.words[0 if value is None else 1 if value else 2]
        if value == int(value) and abs(value) < 10**16:
            return f"{int(value)}(?:\\.0)?"
        return regex_of_text(str(value) if isinstance(value, int) else repr(value))


def _joined(parts: list[Expr], comma: Expr) -> list[Expr]:
    return [one for part in parts for one in (comma, part)][1:]


def _binding(schema: Schema) -> set[str]:
    """Its keywords that say something."""
    if not isinstance(schema.value, dict):
        return set()
    return {keyword for keyword in schema.value if keyword not in NOT_BINDING and not keyword.startswith("x-")}
