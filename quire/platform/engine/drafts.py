"""What proposes draft tokens, as the settings say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config.speculative import speculative
from quire.errors import QuireError
from quire.platform.sampling.speculative.lookup import AnswerLookup, PromptLookup, Proposer
from quire.platform.scheduling.drafting import Drafting, DraftMarks
from quire.types import STATE


def drafting_of(given: Mapping[str, object] | None, windows: Sequence[int], vocab_size: int) -> Drafting | None:
    """given: `speculative_config`; None: no drafts are made. windows: of the model's groups of layers. vocab_size: the
    number of logits.

    Raises QuireError for a model whose layers keep states: one that was overwritten by a wrong draft would be lost.
    """
    if given is None:
        return None
    config = speculative(given)
    if config.method == "draft_model":  # the worker has seen to it that the model can have one
        return Drafting(DraftMarks(), config.num_speculative_tokens, vocab_size, by_model=True)
    if STATE in windows:
        raise QuireError(
            "speculative_config: this model has layers that keep a state in the place of keys, which a draft that "
            "turns out wrong would overwrite; leave it out."
        )
    kinds: dict[str, type[PromptLookup] | type[AnswerLookup]] = {"ngram": PromptLookup, "suffix": AnswerLookup}
    proposer: Proposer = kinds[config.method](config.prompt_lookup_min, config.prompt_lookup_max)
    return Drafting(proposer, config.num_speculative_tokens, vocab_size)
