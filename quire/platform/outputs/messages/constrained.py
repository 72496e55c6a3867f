"""A conversation's sampling parameters, with what its answers are held to."""

from __future__ import annotations

from dataclasses import replace

from quire.platform.outputs.messages.message_format import MessageFormat
from quire.platform.outputs.messages.tool_choice import Tools
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.sampling.structured.params import ReasoningTexts


def constrained(
    params: SamplingParams | BeamSearchParams,
    format: MessageFormat,
    tools: Tools | None,
    begins_in_reasoning: bool | None,
    strict: bool,
) -> SamplingParams | BeamSearchParams:
    """The parameters with calls of tools and the answer's own shape behind the reasoning, and with the reasoning's
    bound.

    begins_in_reasoning: of MessageFormat. strict: calls of the model's own accord are shaped too.

    Raises RequestError for tools that may be called where the format of calls is not known.
    """
    shape = format.constraint(tools, params.structured_outputs, begins_in_reasoning, strict=strict)
    if isinstance(params, BeamSearchParams):
        return replace(params, structured_outputs=shape)
    params = replace(params, structured_outputs=shape)
    if params.thinking_token_budget is None or params.reasoning is not None or format.reasoning is None:
        return params
    if begins_in_reasoning is False:  # the prompt has ended it
        return replace(params, thinking_token_budget=None)
    thought = format.reasoning
    return replace(params, reasoning=ReasoningTexts(thought.begins, thought.ends, bool(begins_in_reasoning)))
