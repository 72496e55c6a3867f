"""How calls of functions write their arguments where that is not JSON: as Python does, or each between tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.facts import Facts, Node
from quire.platform.sampling.structured.json_schema.rules import EMPTY, Expr, choice, sequence
from quire.platform.sampling.structured.json_schema.texts import is_empty, raw_expression_of, regex_of_text
from quire.platform.sampling.structured.json_schema.writer import Notation, Writer


class PythonArguments:
    """name=value, name=value: values are Python's, texts between double quotes."""

    def __init__(self) -> None:
        self.begin: Expr = EMPTY
        self.end: Expr = EMPTY
        self.notation = Notation(self, words=("None", "True", "False"))

    def member(self, compiler: Writer, name: str, node: Node) -> tuple[Expr, Expr]:
        """name=value. Raises RequestError for what is no name in Python."""
        if not name.isidentifier():
            raise RequestError(f"json schema: {name!r} cannot be written as the name of a Python argument.")
        first, later = (compiler.grammar.terminal(f"/{comma}{regex_of_text(name)}=/") for comma in ("", ", ?"))
        value = compiler.node(node)
        return sequence(first, value), sequence(later, value)


class XmlParameters:
    """key[0] name key[1] value[0] value value[1], a separator between two. Texts as they are, others as JSON."""

    def __init__(self, format: Mapping[str, Any], where: str) -> None:
        self.key = _two_texts(format, "key", where)
        self.value = _two_texts(format, "value", where)
        self.separator = format.get("separator", "")
        if not isinstance(self.separator, str):
            raise RequestError(f"structural_tag: {where}.separator is a text.")
        self.begin: Expr = EMPTY
        self.end: Expr = EMPTY
        self.notation = Notation(self)

    def member(self, compiler: Writer, name: str, node: Node) -> tuple[Expr, Expr]:
        """An argument between its tags."""
        grammar = compiler.grammar
        key = self.key[0] + name + self.key[1]
        # A terminal with the separator: what may come in its stead may begin like it.
        first, later = (grammar.terminal(f"/{regex_of_text(before + key)}/") for before in ("", self.separator))
        begin = regex_of_text(self.value[0])
        end = regex_of_text(self.value[1])
        found = compiler.expander.branches(node)
        texts_alone = all(facts.kinds == {"string"} for facts in found)
        options: list[Expr] = []
        for facts in found:
            options += [
                grammar.terminal(expression)
                for expression in self._texts(facts, texts_alone, begin, end)
                if not is_empty(expression)
            ]
            others = facts.copy()
            others.kinds = facts.kinds - {"string"}
            if facts.values is not None:
                others.values = [one for one in facts.values if not isinstance(one, str)]
            if others.kinds and others.values != []:
                other = choice(compiler.options(others))
                options.append(sequence(grammar.terminal(f"/{begin}/"), other, grammar.terminal(f"/{end}/")))
        value = choice(options)
        return sequence(first, value), sequence(later, value)

    def _texts(self, facts: Facts, alone: bool, begin: str, end: str) -> list[str]:
        """Lark expressions of the texts, as they are, with what stands around them."""
        if "string" not in facts.kinds:
            return []
        inner = raw_expression_of(facts)
        if inner is None:
            return []
        ends = regex_of_text(self.value[1].strip() or self.value[1])
        parts = [f"({inner})", f"~/(?s:.)*{ends}(?s:.)*/"]
        if not alone:
            # A text that reads like another value would be taken for one.
            parts.append("/[A-Za-z](?s:.)*/ & ~/(?i:true|false|null|none)[ \\t\\r\\n]*/")
        return [f"/{begin}/ ({' & '.join(parts)}) /{end}/"]


def _two_texts(format: Mapping[str, Any], name: str, where: str) -> tuple[str, str]:
    given = format.get(name)
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise RequestError(f"structural_tag: {where}.{name} is a list of two texts.")
    if name == "value" and not given[1]:
        raise RequestError(f"structural_tag: {where}.value: a value is followed by a text that ends it.")
    return given[0], given[1]
