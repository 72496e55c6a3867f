"""From a request's prompt or messages to what the engine takes. Runs on workers: it tokenizes and renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.platform.chat import ChatPrompt, render_chat
from quire.platform.intake import PromptType
from quire.platform.tokenizer import encode_prompt, encode_rendered
from quire.server.api.context import Context
from quire.server.api.errors import ApiError

_MAX_SALT = 1024  # characters
_MAX_PARTS = 10_000  # messages, and parts of their contents

# Of a part: what it may have beside its type. What else it has would be dropped.
_PART_KEYS = {
    "text": {"text"},
    "input_text": {"text"},
    "image_url": {"image_url"},
    "input_image": {"image_url", "detail"},
    "image": {"image", "url"},
}
_DETAILS = (None, "auto", "high")
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio")


class Reader:
    """Makes prompts. Raises ApiError and RequestError for what cannot be served."""

    def __init__(self, context: Context) -> None:
        engine = context.engine.core
        self._config = context.config
        self._tokenizer = engine.tokenizer
        self._sight = engine.intake.sight
        self._max_model_len = engine.limits.max_model_len
        self._longest_token = context.longest_token

    def completion_prompts(self, prompts: Sequence[Any], body: Any, max_tokens: int | None) -> list[PromptType]:
        """Prompts of /v1/completions, as its body says that they are to be read. max_tokens: of the answer."""
        salt = self._salt(body.cache_salt)
        return [{**self._prompt(one, body, max_tokens), **salt} for one in prompts]

    def _prompt(self, prompt: str | list[int], body: Any, max_tokens: int | None) -> dict[str, Any]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            if body.add_special_tokens in (None, True) and body.truncate_prompt_tokens is None:
                return {"prompt": prompt}
            prompt = self.tokens(prompt, body.add_special_tokens is not False)
        return {"prompt_token_ids": self._truncated(prompt, body.truncate_prompt_tokens, max_tokens)}

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        self._check_length(len(text), "prompt")
        if self._tokenizer is None:
            raise RequestError("prompt: no tokenizer is loaded, so a prompt must be token ids, not text")
        return encode_prompt(self._tokenizer, text) if add_special_tokens else encode_rendered(self._tokenizer, [text])

    def chat_prompt(self, body: Any, max_tokens: int | None) -> PromptType:
        """The prompt of a body of /v1/chat/completions. max_tokens: of the answer."""
        if body.add_special_tokens:
            raise ApiError(400, "add_special_tokens: the chat template writes them.", "add_special_tokens")
        salt = self._salt(body.cache_salt)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            kwargs["documents"] = body.documents
        chat = self.render(body, kwargs)
        token_ids = chat.token_ids
        if body.truncate_prompt_tokens is not None:
            if chat.images:
                raise ApiError(
                    400, "truncate_prompt_tokens: is not served together with images.", "truncate_prompt_tokens"
                )
            token_ids = self._truncated(token_ids, body.truncate_prompt_tokens, max_tokens)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids, **salt}
        if chat.images:
            prompt["multi_modal_data"] = {"image": chat.images}
        if body.mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = body.mm_processor_kwargs
        return prompt

    def render(self, body: Any, template_kwargs: Mapping[str, Any] | None) -> ChatPrompt:
        """Messages through the chat template."""
        _check_messages(body.messages)
        self._check_length(_characters(body.messages), "messages")
        opened = bool(body.continue_final_message)
        return render_chat(
            self._tokenizer,
            body.messages,
            image_marker=self._sight.marker if self._sight else None,
            chat_template=self._config.chat_template,
            add_generation_prompt=not opened if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=opened,
            template_kwargs=template_kwargs,
            max_characters=self._max_characters(),
        )

    def _salt(self, salt: str | None) -> dict[str, str]:
        if salt is None:
            return {}
        if not 0 < len(salt) <= _MAX_SALT:
            raise ApiError(400, f"cache_salt: must have 1 to {_MAX_SALT} characters.", "cache_salt")
        return {"cache_salt": salt}

    def _check_length(self, characters: int, field: str) -> None:
        """Before anything is tokenized: no text of more characters can fit, whatever it is."""
        if characters > self._max_characters():
            raise ApiError(
                400,
                f"{field}: has {characters} characters, which cannot be max_model_len={self._max_model_len} tokens or "
                "fewer: shorten it.",
                field,
            )

    def _max_characters(self) -> int:
        return self._max_model_len * self._longest_token()

    def _truncated(self, token_ids: list[int], most: int | None, max_tokens: int | None) -> list[int]:
        """Its last tokens: as many as are asked for; -1: as many as leave room for the answer."""
        if most is None:
            return token_ids
        if most == -1:
            most = max(1, self._max_model_len - (max_tokens or 1))
        if not 1 <= most <= self._max_model_len:
            raise ApiError(
                400,
                f"truncate_prompt_tokens: {most} is refused: it is -1, or from 1 to {self._max_model_len}.",
                "truncate_prompt_tokens",
            )
        return token_ids[-most:]


def several(prompt: Any, most: int) -> list[Any]:
    """One prompt or several -> several. Raises ApiError for none, and for more than `most`."""
    if prompt is None or prompt == []:
        raise ApiError(400, "prompt: is empty; it must have at least one token.", "prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > most:
        raise ApiError(400, f"prompt: has {len(prompts)} prompts, and the limit is {most}.", "prompt")
    return prompts


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what would be dropped; the messages' form is the renderer's to check."""
    contents = [message.get("content") for message in messages]
    parts = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if parts > _MAX_PARTS:
        raise ApiError(400, f"messages: have {parts} parts, and the limit is {_MAX_PARTS}.", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        asked = next((key for key in _TOOL_KEYS if message.get(key)), None)
        if asked is not None or message.get("role") in ("tool", "function"):
            raise ApiError(400, f"{where}.{asked or 'role'}: this version serves no tool calls.", "messages")
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping):
                _check_part(f"{where}.content[{place}]", part)


def _check_part(where: str, part: Mapping[str, Any]) -> None:
    known = _PART_KEYS.get(str(part.get("type")))
    unknown = sorted(set(map(str, part)) - known - {"type"}) if known is not None else []
    if unknown:
        raise ApiError(400, f"{where}.{unknown[0][:80]}: there is no such field; nothing is ignored.", "messages")
    image = part.get("image_url")
    if isinstance(image, Mapping):
        more = sorted(set(map(str, image)) - {"url", "detail"})
        if more:
            raise ApiError(400, f"{where}.image_url.{more[0][:80]}: there is no such field.", "messages")
        part = {**part, "detail": image.get("detail")}
    if part.get("detail") not in _DETAILS:
        raise ApiError(
            400, f"{where}: detail is auto or high: images are seen as the model's processor makes them.", "messages"
        )


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Of the texts in messages."""
    total = 0
    for message in messages:
        content = message.get("content")
        parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            total += len(text) if isinstance(text, str) else 0
    return total
