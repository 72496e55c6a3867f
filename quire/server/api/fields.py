"""Every field that a request may have: OpenAI's, by the types of the `openai` package, and vLLM's beside them.

A field is honoured, or refused with a reason; nothing is ignored. docs/server.md has this as a table.
"""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic_core import PydanticCustomError, core_schema

from quire.platform.chat_messages import MAX_MESSAGES
from quire.platform.sampling_params import MAX_LOGIT_BIAS


@dataclass(frozen=True)
class Refusal:
    """A field that is not served. why: the rest of "field: ..."; neutral: values that ask for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        return value is None or any(type(value) is type(other) and value == other for other in self.neutral)


_TOOLS = "this version serves no tool calls"
_STRUCTURE = "this version serves no structured output"
_AUDIO = "text and images are served, no audio"
_CACHE = "the prefix cache keeps what fits and needs no advice; cache_salt separates tenants"

# Of OpenAI's.
_REFUSED_BY_BOTH: dict[str, Refusal] = {
    "response_format": Refusal(_STRUCTURE, ({"type": "text"},)),
    # Of vLLM's.
    "structured_outputs": Refusal(_STRUCTURE),
    "guided_json": Refusal(_STRUCTURE),
    "guided_regex": Refusal(_STRUCTURE),
    "guided_choice": Refusal(_STRUCTURE),
    "guided_grammar": Refusal(_STRUCTURE),
    "guided_decoding_backend": Refusal(_STRUCTURE),
    "guided_whitespace_pattern": Refusal(_STRUCTURE),
    "structural_tag": Refusal(_STRUCTURE),
    "priority": Refusal("requests are served in the order in which they came", (0,)),
    "logits_processors": Refusal("no code comes with requests; logit_bias, bad_words and allowed_token_ids are served"),
    "kv_transfer_params": Refusal("KV blocks are not sent between engines"),
    "vllm_xargs": Refusal("these are arguments for vLLM's plug-ins"),
}

REFUSED_IN_COMPLETIONS: dict[str, Refusal] = {
    "suffix": Refusal("no text is filled in before a suffix", ("",)),
    "prompt_embeds": Refusal("prompts are texts or token ids"),
    **_REFUSED_BY_BOTH,
}

REFUSED_IN_CHAT: dict[str, Refusal] = {
    "audio": Refusal(_AUDIO),
    "modalities": Refusal(_AUDIO, (["text"],)),
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_TOOLS, (True, False)),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none", "auto")),
    "metadata": Refusal("nothing is stored", ({},)),
    "store": Refusal("nothing is stored", (False,)),
    "moderation": Refusal("nothing is moderated"),
    "prediction": Refusal("no predicted output is used"),
    "prompt_cache_options": Refusal(_CACHE),
    "prompt_cache_retention": Refusal(_CACHE),
    "reasoning_effort": Refusal("reasoning has no levels here; a template may, by chat_template_kwargs", ("none",)),
    "service_tier": Refusal("there is one tier", ("auto", "default")),
    "verbosity": Refusal("ask for it in the prompt", ("medium",)),
    "web_search_options": Refusal("nothing is searched"),
    "chat_template": Refusal("templates come from the model, or from the server's --chat-template; never in requests"),
    "include_reasoning": Refusal("reasoning is not told apart from the answer", (True,)),
    "media_io_kwargs": Refusal("mm_processor_kwargs changes how images are processed"),
    "thinking_token_budget": Refusal("reasoning is not told apart from the answer"),
    **_REFUSED_BY_BOTH,
}

# vLLM's that are honoured: name -> type.
_EXTRAS_OF_BOTH: dict[str, Any] = {
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "use_beam_search": bool,
    "length_penalty": float,
    "stop_token_ids": list[int],
    "include_stop_str_in_output": bool,
    "ignore_eos": bool,
    "min_tokens": int,
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
    "truncate_prompt_tokens": int,
    "prompt_logprobs": int,
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "add_special_tokens": bool,
    "request_id": str,
    "return_tokens_as_token_ids": bool,
    "return_token_ids": bool,
    "cache_salt": str,
}
_CHAT_EXTRAS: dict[str, Any] = {
    "best_of": int,
    "echo": bool,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "documents": list[dict[str, str]],
    "chat_template_kwargs": dict[str, Any],
    "mm_processor_kwargs": dict[str, Any],
    **_EXTRAS_OF_BOTH,
}

# Where the `openai` package says what no JSON is, what quire cannot do without, or less than quire takes.
_OTHERWISE: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "messages": list[dict[str, Any]],  # checked by platform.chat_messages, which takes more kinds of parts
    "logit_bias": dict[str, float],
    "stream_options": dict[str, bool],
}


class _FirstFault:
    """Makes pydantic stop at a list's first fault: it would list one for each entry, and that is memory and time."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "fail_fast": True}


class _AtMost:
    """Refuses more entries than any field takes before it looks at them. Of objects pydantic lists every fault."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, given: Any) -> Any:
        if isinstance(given, (dict, list)) and len(given) > self._most:
            raise PydanticCustomError("too_long", "has more than {most} entries", {"most": self._most})
        return given


FIRST_FAULT = _FirstFault()
_FEW_ITEMS, _FEW_ENTRIES = _AtMost(MAX_MESSAGES), _AtMost(MAX_LOGIT_BIAS)


def _bounded(hint: Any) -> Any:
    """A type whose check costs no more than its first fault, with lists for what the `openai` package calls Iterable
    or Sequence: what JSON has.
    """
    origin, inner = get_origin(hint), tuple(_bounded(part) for part in get_args(hint))
    if origin in (Union, UnionType):
        return Union[inner]  # noqa: UP007 (made at run time)
    if origin in (collections.abc.Iterable, collections.abc.Sequence, list):
        listed: Any = Annotated[list[inner[0]], FIRST_FAULT]  # type: ignore[valid-type]
        return listed if inner[0] is int else Annotated[listed, _FEW_ITEMS]
    if origin is dict and inner[1] is not Any:
        return Annotated[hint, _FEW_ENTRIES]
    return hint


def _openai_fields(params: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(params)
    return {name: _OTHERWISE.get(name, hint) for name, hint in hints.items()}


def _honoured(params: Any, extras: Mapping[str, Any], refused: Mapping[str, Refusal]) -> dict[str, Any]:
    fields = {**_openai_fields(params), **extras}
    return {name: _bounded(hint) for name, hint in fields.items() if name not in refused}


COMPLETION_FIELDS = _honoured(CompletionParams, _EXTRAS_OF_BOTH, REFUSED_IN_COMPLETIONS)
CHAT_FIELDS = _honoured(ChatParams, _CHAT_EXTRAS, REFUSED_IN_CHAT)
