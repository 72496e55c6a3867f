"""From what a request asks for to the logits processor that sees to it: grammars are compiled where no step waits."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from quire.errors import RequestError
from quire.platform.sampling.logits_processors.base import LogitsProcessor
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.structured.compilation import compile_constraint
from quire.platform.sampling.structured.constraint import CompiledConstraint
from quire.platform.sampling.structured.grammar_cache import Compilations, Grammars
from quire.platform.sampling.structured.params import StructuredOutputsParams
from quire.platform.sampling.structured.processor import TokenConstraint
from quire.platform.sampling.structured.template import Template
from quire.platform.sampling.structured.thinking import ThinkingBudget
from quire.platform.sampling.structured.vocabulary import Vocabulary, VocabularySource, vocabulary_source

_MOST_KNOWN = 96  # shapes of requests, as `Grammars` keeps their grammars


class RemoteGrammars(Protocol):
    """Where steps are computed in another process: what compiles over there."""

    def take_vocabulary(self, source: VocabularySource) -> None:
        """Make a vocabulary. Raises RequestError."""
        ...

    def compile(self, digest: bytes, constraint: CompiledConstraint) -> None:
        """Have a constraint compiled before the first plan needs it. Raises RequestError."""
        ...


class ConstraintCompiler:
    """From what requests ask for to logits processors. Any thread may ask; it waits for its own grammar alone.

    tokenizer: transformers'. size: the number of logits. never: tokens that no shape may have. remote: where steps are
    computed in another process.
    """

    def __init__(
        self,
        tokenizer: Any,
        size: int,
        eos_ids: frozenset[int],
        never: Sequence[int] = (),
        remote: RemoteGrammars | None = None,
    ) -> None:
        self._given = tokenizer, size, eos_ids, never
        self._remote = remote
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._work = Compilations()
        self._known: OrderedDict[bytes, CompiledConstraint] = OrderedDict()  # the compiling thread's

    def processors(self, params: SamplingParams, stop_ids: frozenset[int]) -> list[LogitsProcessor]:
        """What a request's structured_outputs and thinking_token_budget need. stop_ids: the tokens that end an answer,
        where it may end.

        Raises RequestError for a shape that cannot be enforced, or takes too long to prepare.
        """
        made: list[LogitsProcessor] = []
        if params.thinking_token_budget is not None:
            if params.reasoning is None:
                raise RequestError(
                    "thinking_token_budget: it is not known which texts begin and end this model's reasoning; name its "
                    "format (--reasoning-parser), or give SamplingParams the texts (reasoning=ReasoningTexts(...))."
                )
            grammars = self._work.run(self._vocabulary)
            made.append(ThinkingBudget(grammars.vocabulary, params.reasoning, params.thinking_token_budget))
        if params.structured_outputs is not None:
            made.append(self._constraint(params.structured_outputs, stop_ids))
        return made

    def _constraint(self, params: StructuredOutputsParams, stop_ids: frozenset[int]) -> TokenConstraint:
        template = self._work.run(lambda: self._template(params))
        return TokenConstraint(template, stop_ids)

    def _vocabulary(self) -> Grammars:
        with self._lock:
            if self._grammars is None:
                source = vocabulary_source(*self._given)
                if self._remote is not None:
                    self._remote.take_vocabulary(source)
                self._grammars = Grammars(source)
            return self._grammars

    def _template(self, params: StructuredOutputsParams) -> Template:
        grammars = self._vocabulary()
        constraint = self._constraint_of(params, grammars.vocabulary)
        try:
            if self._remote is not None:
                self._remote.compile(grammars.vocabulary.source.digest, constraint)
            return grammars.template(constraint)
        except RequestError:
            self._check_alone(params, grammars)
            raise

    def _constraint_of(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> CompiledConstraint:
        """What the shape comes to: known, where it was asked for before."""
        key = _key(params)
        if key is not None and key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        try:
            constraint = compile_constraint(params, vocabulary)
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: {error}") from error
        if key is not None:
            self._known[key] = constraint
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return constraint

    def _check_alone(self, params: StructuredOutputsParams, grammars: Grammars) -> None:
        """Raises RequestError about the schema that is refused by itself, of those that have places in the request."""
        for place, schema in _placed(params.structural_tag):
            try:
                alone = compile_constraint(StructuredOutputsParams(json=schema), grammars.vocabulary)
                Template(alone, grammars.vocabulary)
            except RequestError as error:
                raise RequestError(f"{place}: {str(error).removeprefix('structured_outputs: ')}") from None


def _key(params: StructuredOutputsParams) -> bytes | None:
    """The same for the same shape; None for a class, whose schema may be another under the same name."""
    if isinstance(params.json, type):
        return None
    try:
        told = repr(params)
    except RecursionError:
        return None
    return hashlib.sha256(told.encode(errors="surrogatepass")).digest()


def _placed(structure: Any) -> Iterator[tuple[str, Any]]:
    """(place, schema) of a structural tag's schemas that have places. It has compiled: it is not nested deeply."""
    if isinstance(structure, Mapping):
        if "json_schema" in structure:
            if structure.get("place"):
                yield structure["place"], structure["json_schema"]
            return
        structure = list(structure.values())
    for one in structure if isinstance(structure, list) else ():
        yield from _placed(one)
