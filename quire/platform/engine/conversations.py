"""`LLM.chat`: conversations made prompts, and answers made messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quire.config import RequestDefaults
from quire.errors import RequestError
from quire.platform.inputs.chat import ChatPrompt, render_chat, template_of, template_variables
from quire.platform.inputs.chat_messages import tool_schemas
from quire.platform.inputs.numbered import NumberedMarkers
from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.outputs.messages.constrained import constrained
from quire.platform.outputs.messages.message import Message, collect
from quire.platform.outputs.messages.message_format import MessageFormat, formats_of
from quire.platform.outputs.messages.tool_choice import Tools, check_tools
from quire.platform.outputs.outputs import CompletionOutput, RequestOutput
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.types import MediaKind

Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What all conversations of a call have in common: arguments of `LLM.chat`, by its names."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Any] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None


class Conversations:
    """The conversations of one call. Raises RequestError for what cannot be served."""

    def __init__(
        self,
        tokenizer: Any,
        marker: str | None,
        defaults: RequestDefaults,
        options: ChatOptions,
        lay_out: Callable[[Sequence[str], int], list[str]] | None = None,
        other_markers: Mapping[MediaKind, str] = MappingProxyType({}),
        numbered: NumberedMarkers | None = None,
    ) -> None:
        """marker: the text of the model's image token, if it takes images; other_markers: of further kinds. lay_out,
        numbered: as of `render_chat`."""
        self._tokenizer = tokenizer
        self._marker = marker
        self._other_markers = other_markers
        self._lay_out = lay_out
        self._numbered = numbered
        self._strict = defaults.tool_strict
        self._options = options
        self._template = options.chat_template or defaults.chat_template
        self._schemas = tool_schemas(options.tools)
        self._tools = check_tools(self._schemas, options.tool_choice, options.parallel_tool_calls)
        self._format = self._format_for(defaults)

    def _format_for(self, defaults: RequestDefaults) -> MessageFormat:
        """How answers are read. What the model calls of its own accord is content where its format is not known."""
        template = self._template
        if template is not None and "{" not in template:
            template = template_of(self._tokenizer, template)
        found = formats_of(
            self._tokenizer,
            template,
            tool_parser=defaults.tool_call_parser,
            reasoning_parser=defaults.reasoning_parser,
        )
        tools = self._tools
        if tools is None:
            return replace(found, tools=None)
        if tools.choice == "none":  # the template is not told of them; a call all the same is left out
            return found
        if not tools.forced and "tools" not in template_variables(
            template_of(self._tokenizer, self._template, self._schemas)
        ):
            raise RequestError(
                "tools: this model's chat template has no place for tools, so that the model would not know them; "
                "give a chat_template that has one."
            )
        return found

    def render(self, messages: Any) -> ChatPrompt:
        """One conversation through the template."""
        options = self._options
        return render_chat(
            self._tokenizer,
            messages,
            image_marker=self._marker,
            lay_out=self._lay_out,
            numbered=self._numbered,
            other_markers=self._other_markers,
            chat_template=self._template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=None if self._tools is not None and self._tools.choice == "none" else self._schemas,
            template_kwargs=options.chat_template_kwargs,
        )

    def prompt(self, chat: ChatPrompt, mm_processor_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """As `LLM.generate` takes it."""
        return {
            "prompt": chat.text,
            "prompt_token_ids": chat.token_ids,
            "multi_modal_data": chat.multi_modal_data,
            "mm_processor_kwargs": mm_processor_kwargs if chat.images else None,
        }

    def begins_in_reasoning(self, chat: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> bool | None:
        """Whether the answer to a prompt does, if that is certain."""
        content = messages[-1].get("content") if self._options.continue_final_message else None
        return self._format.begins_in_reasoning(chat.text, content if isinstance(content, str) else "")

    def constrained(self, params: Params, begins: bool | None) -> Params:
        """The parameters with what tokens must follow. begins: of `begins_in_reasoning`."""
        return constrained(params, self._format, self._callable_tools, begins, self._strict)

    @property
    def _callable_tools(self) -> Tools | None:
        tools = self._tools
        return tools if tools is not None and (tools.forced or self._format.tools is not None) else None

    def answered(self, output: RequestOutput, params: Params, begins: bool | None) -> RequestOutput:
        """An output with the messages that its texts are."""
        made = [
            replace(one, message=self._message(output, one, params, begins)) if one.finished() else one
            for one in output.outputs
        ]
        return replace(output, outputs=made)

    def _message(
        self, output: RequestOutput, completion: CompletionOutput, params: Params, begins: bool | None
    ) -> Message:
        parser = self._format.parser(
            self._callable_tools, begins, request_id=output.request_id, choice=completion.index
        )
        text = completion.text
        if isinstance(params, SamplingParams) and params.skip_special_tokens and self._format.needs_special_tokens:
            text = self._with_special_tokens(output, completion, params)
        return collect([*parser.feed(text), *parser.finish(completion.finish_reason == "length")])

    def _with_special_tokens(self, output: RequestOutput, completion: CompletionOutput, params: SamplingParams) -> str:
        """The text with the special tokens by which the parser knows its parts."""
        whole = Detokenizer(self._tokenizer, output.prompt_token_ids, replace(params, skip_special_tokens=False))
        ended = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        shown = len(completion.token_ids) - (ended and not params.include_stop_str_in_output)
        for token in completion.token_ids[:shown]:
            whole.append(token)
        whole.finish()
        return whole.emittable(True)
