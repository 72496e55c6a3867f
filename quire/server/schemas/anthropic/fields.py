"""Every field that a body of /v1/messages may have: Anthropic's, and vLLM's sampling parameters beside them.

As in `schemas/fields.py` a field is honoured, accepted as it changes nothing, or refused with a reason.
"""

from __future__ import annotations

from typing import Any, Optional

from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from pydantic import Field, create_model

from quire.server.schemas.anthropic.typed import hints_of, json_type
from quire.server.schemas.fields import ACCEPTED, CHAT_FIELDS, Acceptance, Refusal
from quire.server.schemas.openai import Body

ACCEPTED_IN_MESSAGES: dict[str, Acceptance] = {
    "cache_control": ACCEPTED["cache_control"],
    "service_tier": Acceptance("There is one tier", ("auto", "standard_only")),
    "inference_geo": Acceptance("It runs where the server is"),
    "user_profile_id": Acceptance("Requests stand alone"),
    "workspace_id": Acceptance("Requests stand alone"),
}

_NO_EDITS = {"edits": []}  # type: ignore[var-annotated]
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

REFUSED_IN_MESSAGES: dict[str, Refusal] = {
    "container": Refusal("no code runs here"),
    "mcp_servers": Refusal("tools are called by the client", ([],)),
    "context_management": Refusal("nothing is left out unasked; send fewer messages", ({}, _NO_EDITS, _KEEPS_ALL)),
    "compaction": Refusal("nothing is left out unasked; send fewer messages"),
    "thread": Refusal("no conversations are kept; send all messages"),
    "diagnostics": Refusal("nothing is kept of earlier messages", ({}, {"previous_message_id": None})),
    "speed": Refusal("there is one speed", ("standard",)),
    "fallbacks": Refusal("name one model", ([],)),
    "fallback_credit_token": Refusal("there are none"),
    "billing_policy": Refusal("nothing is billed"),
}

# Where the package's types are unions of some thirty: these are checked one by one, with the place of a fault.
_OWN_TYPES: dict[str, Any] = {
    "model": str,
    "messages": list[dict[str, Any]],
    "system": str | list[dict[str, Any]],
    "tools": list[dict[str, Any]],
    "tool_choice": dict[str, Any],
    "thinking": dict[str, Any],
    "output_config": dict[str, Any],
    "metadata": dict[str, Any],
}
# Of other versions of the package.
_OF_OTHERS: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
}
_SAME = (
    "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos",
    "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "cache_salt", "vllm_xargs", "request_id",
    "chat_template_kwargs", "documents", "mm_processor_kwargs",
)  # fmt: skip
EXTRAS = {name: CHAT_FIELDS[name] for name in _SAME}
"""vLLM's, as /v1/chat/completions has them."""


def _fields(params: Any) -> dict[str, Any]:
    """Those that are honoured, by their types."""
    own = {name: _OWN_TYPES.get(name) or json_type(hint) for name, (hint, _) in hints_of(params).items()}
    return {name: hint for name, hint in own.items() if name not in {*ACCEPTED_IN_MESSAGES, *REFUSED_IN_MESSAGES}}


_OUTPUT = {"output_config": dict[str, Any], "output_format": dict[str, Any]}
_OF_PROMPTS = ("chat_template_kwargs", "documents", "mm_processor_kwargs")

MESSAGES_FIELDS = {**_fields(MessageCreateParamsNonStreaming), **_OF_OTHERS, **_OUTPUT, "stream": bool, **EXTRAS}
COUNT_FIELDS = {**_fields(MessageCountTokensParams), **_OUTPUT, **{name: EXTRAS[name] for name in _OF_PROMPTS}}


def _request(name: str, honoured: dict[str, Any], required: set[str]) -> type[Body]:
    fields: dict[str, Any] = {}
    for field, hint in honoured.items():
        fields[field] = (hint, ...) if field in required else (Optional[hint], None)  # noqa: UP045 (made at run time)
    for field, refusal in REFUSED_IN_MESSAGES.items():
        fields[field] = (Any, Field(None, description=f"Refused, unless neutral: {refusal.why}."))
    for field, acceptance in ACCEPTED_IN_MESSAGES.items():
        fields[field] = (Any, Field(None, description=f"Changes nothing. {acceptance.why}."))
    return create_model(name, __base__=Body, **fields)


MessagesRequest = _request("MessagesRequest", MESSAGES_FIELDS, {"messages", "max_tokens"})
MessagesRequest.__doc__ = "Anthropic's /v1/messages, with vLLM's sampling parameters."

CountTokensRequest = _request("CountTokensRequest", COUNT_FIELDS, {"messages"})
CountTokensRequest.__doc__ = "Anthropic's /v1/messages/count_tokens."
