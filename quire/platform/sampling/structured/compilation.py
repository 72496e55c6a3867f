"""From a request's StructuredOutputsParams to grammars: a pure function, bounded in time and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from quire.errors import RequestError
from quire.platform.sampling.structured.constraint import CompiledConstraint
from quire.platform.sampling.structured.grammars import grammar_of
from quire.platform.sampling.structured.json_schema.compiler import schema_grammar
from quire.platform.sampling.structured.json_schema.writer import Spacing
from quire.platform.sampling.structured.params import StructuredOutputsParams
from quire.platform.sampling.structured.regexes import choice_grammar, regex_grammar
from quire.platform.sampling.structured.structural_tags import Options, compile_structural_tag

_ANY_OBJECT = {"type": "object"}


class SpecialTokens(Protocol):
    """What grammars need of a vocabulary."""

    def special_tokens(self) -> Mapping[str, int]:
        """The text of each special token -> its id."""
        ...


def compile_constraint(params: StructuredOutputsParams, vocabulary: SpecialTokens) -> CompiledConstraint:
    """What `params` ask for, as grammars. Raises RequestError naming what cannot be enforced, and the way out."""
    try:
        made = _compiled(params, vocabulary)
    except RecursionError:
        raise RequestError("structured_outputs: it is nested too deeply; make it flatter.") from None
    if params.opens and (params.after is None or made.grammar is not None):
        raise RequestError(
            "structured_outputs opens: it goes with after, before free text with shaped parts; leave it out."
        )
    return replace(made, after=params.after, opens=params.opens)


def _compiled(params: StructuredOutputsParams, vocabulary: SpecialTokens) -> CompiledConstraint:
    spacing = Spacing(compact=params.disable_any_whitespace, pattern=params.whitespace_pattern)
    if spacing.compact and spacing.pattern is not None:
        raise RequestError("structured_outputs: disable_any_whitespace and whitespace_pattern exclude each other.")
    closed = params.disable_additional_properties
    if params.structural_tag is not None:
        options = Options(spacing, closed, vocabulary.special_tokens())
        return compile_structural_tag(params.structural_tag, options)
    if params.json is not None:
        grammar = schema_grammar(params.json, spacing, close_objects=closed)
    elif params.json_object:
        grammar = schema_grammar(_ANY_OBJECT, spacing)
    elif params.regex is not None:
        grammar = regex_grammar(params.regex)
    elif params.choice is not None:
        grammar = choice_grammar(params.choice)
    else:
        assert params.grammar is not None  # one of them is given
        grammar = grammar_of(params.grammar)
    return CompiledConstraint(grammar=grammar)
