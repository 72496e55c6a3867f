"""Every field that a body of /v1/responses may have: OpenAI's, and vLLM's sampling parameters beside them.

As in `schemas/fields.py` a field is honoured, accepted as it changes nothing, or refused with a reason.
"""

from __future__ import annotations

import typing
from typing import Any, Optional

from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from pydantic import Field, create_model

from quire.server.schemas.fields import ACCEPTED, CHAT_FIELDS, REFUSED_IN_CHAT, Acceptance, Refusal, bounded
from quire.server.schemas.openai import Body

_BUILT_IN = "Counts calls of built-in tools, and there are none"

ACCEPTED_IN_RESPONSES: dict[str, Acceptance] = {
    **{
        name: ACCEPTED[name]
        for name in (
            "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control",
            "usage", "session_id", "num_ctx", "keep_alive",
        )
    },
    "max_tool_calls": Acceptance(_BUILT_IN),
}  # fmt: skip

REFUSED_IN_RESPONSES: dict[str, Refusal] = {
    "prompt": Refusal("no templates of prompts are kept here; send instructions and input"),
    "conversation": Refusal("no conversations are kept; previous_response_id goes on from a response"),
    "truncation": Refusal(
        "nothing is left out unasked: leave items out of the input, or give truncate_prompt_tokens", ("disabled",)
    ),
    "context_management": Refusal("nothing is made shorter unasked; leave items out of the input", ([],)),
    "moderation": REFUSED_IN_CHAT["moderation"],
    "access_programs": Refusal("there are none"),
    "background_options": Refusal(
        "what runs in the background runs as soon as it can", ({}, {"completion_window": "soonest"})
    ),
    "image": Refusal(
        "images are seen as the model's processor makes them",
        ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
    ),
}

# OpenAI's that are honoured. Where the type is not the `openai` package's, items and options are checked one by one:
# the errors of a union of some thirty types would help nobody.
_OWN_TYPES: dict[str, Any] = {
    "model": str,
    "input": str | list[dict[str, Any]],
    "tools": list[dict[str, Any]],
    "tool_choice": str | dict[str, Any],
    "text": dict[str, Any],
    "reasoning": dict[str, Any],
    "include": list[str],
    "stream": bool,
    "stream_options": dict[str, bool],
    "metadata": dict[str, str],
}
_OPENAI = (
    "background", "include", "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls",
    "previous_response_id", "reasoning", "safety_identifier", "store", "stream", "stream_options", "temperature",
    "text", "tool_choice", "tools", "top_logprobs", "top_p", "user",
)  # fmt: skip

# Of /v1/chat/completions, with the same meaning; those that it refuses it refuses here too.
SHARED = (
    "frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop", "top_k", "min_p", "repetition_penalty",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "allowed_token_ids", "bad_words", "cache_salt",
    "vllm_xargs", "return_tokens_as_token_ids", "documents", "chat_template_kwargs", "mm_processor_kwargs",
    "add_generation_prompt", "continue_final_message",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "include_reasoning",
    "thinking_token_budget", "chat_template", "media_io_kwargs", "priority", "logits_processors",
    "kv_transfer_params", "top_a", "typical_p", "tfs", "mirostat_mode",
)  # fmt: skip


def _types() -> dict[str, Any]:
    given = typing.get_type_hints(ResponseParams)
    types = {name: _OWN_TYPES.get(name, given.get(name, Any)) for name in _OPENAI}
    types |= {name: CHAT_FIELDS[name] for name in SHARED if name in CHAT_FIELDS}
    return {name: bounded(hint) for name, hint in {**types, "request_id": str}.items()}


RESPONSES_FIELDS = _types()
_OF_CHAT = {name: REFUSED_IN_CHAT[name] for name in SHARED if name in REFUSED_IN_CHAT}


def _request() -> type[Body]:
    made: dict[str, Any] = {name: (Optional[hint], None) for name, hint in RESPONSES_FIELDS.items()}  # noqa: UP045
    for name, refusal in {**REFUSED_IN_RESPONSES, **_OF_CHAT}.items():
        made[name] = (Any, Field(None, description=f"Refused, unless neutral: {refusal.why}."))
    shared = {name: ACCEPTED[name] for name in SHARED if name in ACCEPTED}
    for name, acceptance in {**ACCEPTED_IN_RESPONSES, **shared}.items():
        made[name] = (Any, Field(None, description=f"Changes nothing. {acceptance.why}."))
    return create_model("ResponsesRequest", __base__=Body, **made)


ResponsesRequest = _request()
ResponsesRequest.__doc__ = "OpenAI's /v1/responses, with vLLM's sampling parameters."
