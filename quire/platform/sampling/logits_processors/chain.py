"""A request's processors in their order, and how they are applied to rows.

The order is vLLM's: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias, plug-ins in the order in
which the engine was given them, penalties. (A bias cannot lift a logit of -inf, so that logit_bias is added with what
stands first.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.platform.sampling.logits_processors.base import LogitsProcessor, ProcessorError, ProcessorRequest, Row
from quire.platform.sampling.logits_processors.penalties import Penalties
from quire.platform.sampling.logits_processors.token_rules import BadWords, MinTokens, TokenBias
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Link:
    """One processor of a chain. plugin: the name of what is not quire's own. check: see `check_alone`."""

    processor: LogitsProcessor
    plugin: str | None = None
    check: bool = False

    def fork(self) -> Link:
        """For another sequence. Raises ProcessorError."""
        try:
            return Link(self.processor.fork(), self.plugin, self.check)
        except Exception as error:
            raise self.failed(error) from error

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises ProcessorError."""
        try:
            self.processor.advance(token_ids)
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> Exception:
        """What to raise: quire's own faults stay what they are."""
        return error if self.plugin is None else ProcessorError(_failure(self.plugin, error))


Chain = tuple[Link, ...]


class LinkMaker(Protocol):
    """A kind of processor that is not quire's own: see `plugins.Plugin`."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether a request needs one."""
        ...

    def link(self, request: ProcessorRequest) -> Link:
        """One for the request."""
        ...


def build_chain(
    request: ProcessorRequest, plugins: Sequence[LinkMaker] = (), shapes: Sequence[LogitsProcessor] = ()
) -> Chain:
    """The processors of a request that has arrived; empty where its logits stay as they are. shapes: what holds its
    answer to structured_outputs and thinking_token_budget.

    Raises RequestError for arguments that a plug-in refuses, and RuntimeError for a plug-in's faults.
    """
    params = request.params
    chain = [Link(shape) for shape in shapes]
    if TokenBias.needed(request):
        chain.append(Link(TokenBias(request)))
    if BadWords.needed(request):
        chain.append(Link(BadWords(request)))
    if MinTokens.applies_to(params):
        chain.append(Link(MinTokens(request)))
    chain += [plugin.link(request) for plugin in plugins if plugin.applies_to(params)]
    if Penalties.applies_to(params):
        chain.append(Link(Penalties(request)))
    return tuple(chain)


def changed_row(chain: Chain, row: Row, output_ids: Sequence[int]) -> Row | Failure:
    """A changed copy of a row, or why there is none. The chain is not empty, and has read the tokens."""
    link = chain[0]
    try:
        changed = link.processor.changed(row, output_ids)
        for link in chain[1:]:
            link.processor.apply(changed, output_ids)
        return changed
    except Exception as error:
        failed = link.failed(error)
        if isinstance(failed, ProcessorError):
            return failed.failure
        raise


def prepare(links: Sequence[Link], outputs: Sequence[Sequence[int]]) -> None:
    """Let processors of one class get ready for a step. Raises ProcessorError for a single one."""
    try:
        type(links[0].processor).prepare([link.processor for link in links], outputs)
    except Exception as error:
        raise links[0].failed(error) from error


def check_alone(pristine: Chain, row: Row, output_ids: Sequence[int], changed: Row | Failure) -> Row | Failure:
    """`changed`, if processors that are made anew for the sequence alone give the same bits; else why not.

    For debug runs: it finds what depends on the rows beside it, or on more than the request and its tokens.
    """
    plugins = ", ".join(link.plugin for link in pristine if link.plugin is not None)
    if isinstance(changed, Failure):
        return changed
    try:
        again = tuple(link.fork() for link in pristine)
        for link in again:
            link.advance(output_ids)
            prepare([link], [output_ids])
    except ProcessorError as error:
        return error.failure
    alone = changed_row(again, row, output_ids)
    if isinstance(alone, Failure):
        return alone
    if np.array_equal(alone.view(np.int32), changed.view(np.int32)):
        return changed
    return Failure(
        f"logits processor {plugins}: made anew from the request and its tokens, it changes the row in another way; a "
        "processor must depend on nothing else",
        by_caller=False,
    )


def _failure(plugin: str, error: Exception) -> Failure:
    logger.error("logits processor %s fails", plugin, exc_info=error)
    return Failure(f"logits processor {plugin} fails: {type(error).__name__}: {error}", by_caller=False)
