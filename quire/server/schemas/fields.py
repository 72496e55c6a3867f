"""Every field that a request may have: OpenAI's, by the types of the `openai` package, and vLLM's beside them.

A field is honoured, or changes nothing by its own definition (it is accepted, and the answer's header names it), or is
refused with a reason. docs/server.md has this as a table.
"""

from __future__ import annotations

import collections.abc
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic_core import PydanticCustomError, core_schema

from quire.platform.inputs.chat_messages import MAX_MESSAGES
from quire.platform.sampling.params import MAX_LOGIT_BIAS


@dataclass(frozen=True)
class Acceptance:
    """A field that changes no answer, whatever it says. why: as a sentence; neutral: values that need not be named."""

    why: str
    neutral: tuple[Any, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        return value is None or _among(value, self.neutral)


@dataclass(frozen=True)
class Refusal:
    """A field that is not served. why: the rest of "field: ..."; neutral: values that ask for nothing."""

    why: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        return value is None or _among(value, self.neutral)


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


_AUDIO = "answers are texts, no audio; messages may have input_audio parts"
_FILTER = "top_k, top_p and min_p choose among tokens"
_CACHE = "A hint: the prefix cache finds equal beginnings, keeps what fits, and needs no advice"

# What clients send that changes no answer.
ACCEPTED: dict[str, Acceptance] = {
    "metadata": Acceptance("Nothing is stored", ({},)),
    "store": Acceptance("Nothing is stored", (False,)),
    "service_tier": Acceptance("There is one tier", ("auto", "default")),
    "prompt_cache_key": Acceptance(_CACHE),
    "prompt_cache_options": Acceptance(_CACHE),
    "prompt_cache_retention": Acceptance(_CACHE),
    "cache_control": Acceptance(_CACHE),
    "prediction": Acceptance("A guess of the answer, which could only make it faster"),
    "guided_decoding_backend": Acceptance("One engine serves all shapes"),
    "usage": Acceptance("OpenRouter's; `stream_options` asks for usage in streams"),
    "session_id": Acceptance("Requests stand alone"),
    "num_ctx": Acceptance("Ollama's; all of the model's context is always there"),
    "keep_alive": Acceptance("Ollama's; the model stays loaded"),
}

_REFUSED_BY_BOTH: dict[str, Refusal] = {
    # Other engines'.
    "top_a": Refusal(_FILTER, (0, 0.0)),
    "typical_p": Refusal(_FILTER, (1, 1.0)),
    "tfs": Refusal(_FILTER, (1, 1.0)),
    "mirostat_mode": Refusal(_FILTER, (0,)),
    "priority": Refusal("requests are served in the order in which they came", (0,)),
    "logits_processors": Refusal("no code comes with requests; logit_bias, bad_words and allowed_token_ids are served"),
    "kv_transfer_params": Refusal("KV blocks are not sent between engines"),
}

REFUSED_IN_COMPLETIONS: dict[str, Refusal] = {
    "suffix": Refusal("no text is filled in before a suffix", ("",)),
    **_REFUSED_BY_BOTH,
}

REFUSED_IN_CHAT: dict[str, Refusal] = {
    "audio": Refusal(_AUDIO),
    "modalities": Refusal(_AUDIO, (["text"],)),
    "moderation": Refusal("nothing is moderated"),
    "verbosity": Refusal("ask for it in the prompt", ("medium",)),
    "web_search_options": Refusal("nothing is searched"),
    "chat_template": Refusal("templates come from the model, or from the server's --chat-template; never in requests"),
    "media_io_kwargs": Refusal("mm_processor_kwargs changes how images and videos are processed"),
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
    "safety_identifier": str,
    "return_tokens_as_token_ids": bool,
    "return_token_ids": bool,
    "cache_salt": str,
    "vllm_xargs": dict[str, Any],
    # What shape an answer is to have; checked by schemas.structured.
    "response_format": dict[str, Any],
    "structured_outputs": dict[str, Any],
    "guided_json": str | bool | dict[str, Any],
    "guided_regex": str,
    "guided_choice": list[str],
    "guided_grammar": str,
    "guided_whitespace_pattern": str,
    "structural_tag": str | dict[str, Any],
}
_CHAT_EXTRAS: dict[str, Any] = {
    "best_of": int,
    "echo": bool,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "documents": list[dict[str, str]],
    "chat_template_kwargs": dict[str, Any],
    "mm_processor_kwargs": dict[str, Any],
    "reasoning_effort": Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "include_reasoning": bool,
    "thinking_token_budget": int,
    **_EXTRAS_OF_BOTH,
}

# Where the `openai` package says what no JSON is, what quire cannot do without, or less than quire takes.
_OTHERWISE: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "messages": list[dict[str, Any]],  # checked by platform.chat_messages, which takes more kinds of parts
    "logit_bias": dict[str, float],
    "stream_options": dict[str, bool],
    # Checked by outputs.messages.tool_choice, which names what is wrong.
    "tools": list[dict[str, Any]],
    "tool_choice": str | dict[str, Any],
    "functions": list[dict[str, Any]],
    "function_call": str | dict[str, Any],
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


def bounded(hint: Any) -> Any:
    """A type whose check costs no more than its first fault, with lists for what the `openai` package calls Iterable
    or Sequence: what JSON has.
    """
    origin, inner = get_origin(hint), tuple(bounded(part) for part in get_args(hint))
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
    return {name: bounded(hint) for name, hint in fields.items() if name not in refused and name not in ACCEPTED}


# vLLM's first server has one prompt, sampling parameters, and `stream`; `wait` is quire's.
_GENERATE_NAMES = (
    "model", "stream", "n", "best_of", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "use_beam_search", "length_penalty", "logprobs", "prompt_logprobs", "user",
    "cache_salt", "truncate_prompt_tokens", "add_special_tokens", "vllm_xargs", "structured_outputs",
)  # fmt: skip

# Of each prompt that comes as embeddings, base64 of what torch.save writes; these come before those of `prompt`.
_COMPLETION_EXTRAS: dict[str, Any] = {"prompt_embeds": str | list[str], **_EXTRAS_OF_BOTH}

COMPLETION_FIELDS = _honoured(CompletionParams, _COMPLETION_EXTRAS, REFUSED_IN_COMPLETIONS)
CHAT_FIELDS = _honoured(ChatParams, _CHAT_EXTRAS, REFUSED_IN_CHAT)
GENERATE_FIELDS = {
    "prompt": str | bounded(list[int]),
    "wait": bool,
    **{name: COMPLETION_FIELDS[name] for name in _GENERATE_NAMES},
}
