"""From a request's prompt or messages to what the engine takes. Runs on workers: it tokenizes and renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import ContextLengthError, RequestError
from quire.platform.inputs.alone import prompt_alone
from quire.platform.inputs.chat import ChatPrompt, TooManyCharactersError, render_chat, template_of, template_variables
from quire.platform.inputs.chat_messages import names_in_templates
from quire.platform.inputs.processor import PromptType
from quire.platform.inputs.tokenizer import encode_prompt, encode_rendered
from quire.server.context import ServerContext
from quire.server.responses.errors import ApiError

_MAX_SALT = 1024  # characters
_MAX_TEXT = 1 << 20  # characters of a text that is pooled: a word that a tokenizer does not know may be long
MAX_PARTS = 10_000  # messages, and parts of their contents
_MAX_NAMED = 64  # fields that are told of
_MAX_VALUES = 40_000  # of messages and a template's variables: they are copied, and written as JSON, all at once
MAX_EXTRA = 1 << 20  # characters of what templates get beside the messages' texts; more where the model takes more

# Of a part: what it may have beside its type. Of what else it has nothing reaches the model.
_PART_KEYS = {
    "text": {"text"},
    "input_text": {"text"},
    "image_url": {"image_url", "detail", "uuid"},
    "input_image": {"image_url", "detail", "uuid"},
    "image": {"image", "url", "detail", "uuid"},
    "video_url": {"video_url", "uuid"},
    "video": {"video", "url", "uuid"},
    "input_audio": {"input_audio", "uuid"},
    "audio_url": {"audio_url", "uuid"},
    "audio": {"audio", "url", "audio_url", "uuid"},
}
# On a part that does not take them, these are not passed over: they are contents, and sizes of images.
_CONTENTS = frozenset(
    {"text", "image_url", "image", "url", "path", "base64", "image_pil", "image_embeds", "file", "file_id",
     "input_audio", "audio", "audio_url", "video", "video_url"}
)  # fmt: skip
_SIZES = frozenset({"min_pixels", "max_pixels", "resized_height", "resized_width"})
_DETAILS = (None, "auto", "high", "low")
_NOT_WITH_EMBEDS = {
    "echo": "a prompt of embeddings has no text",
    "prompt_logprobs": "a prompt of embeddings has no tokens that could have logprobs",
    "truncate_prompt_tokens": "send the rows that are to be read",
}
_SWITCHES = ("enable_thinking", "thinking")  # of templates whose reasoning has no levels


class PromptReader:
    """Makes prompts. Raises ApiError and RequestError for what cannot be served."""

    def __init__(self, context: ServerContext) -> None:
        engine = context.engine.llm_engine
        self._config = context.config
        self._tokenizer = engine.tokenizer
        self._sight = engine.input_processor.image_spec
        self._max_model_len = engine.limits.max_model_len
        self._longest_token = context.longest_token
        self.ignored_fields: set[str] = set()  # what it has met that changes nothing

    def completion_prompts(self, prompts: Sequence[Any], body: Any, max_tokens: int | None) -> list[PromptType]:
        """Prompts of /v1/completions, as its body says that they are to be read. max_tokens: of the answer."""
        salt = cache_salt(body.cache_salt)
        return [{**(one if isinstance(one, dict) else self._prompt(one, body, max_tokens)), **salt} for one in prompts]

    def _prompt(self, prompt: str | list[int], body: Any, max_tokens: int | None) -> dict[str, Any]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            if body.add_special_tokens in (None, True) and body.truncate_prompt_tokens is None:
                return {"prompt": prompt}
            prompt = self.tokens(prompt, body.add_special_tokens is not False)
        return {"prompt_token_ids": self._truncated(prompt, body.truncate_prompt_tokens, max_tokens)}

    def pooled_prompts(self, given: Sequence[Any], names: Sequence[str], salt: Mapping[str, str]) -> list[PromptType]:
        """Texts and lists of token ids as prompts of a model that pools. names: what the client calls each."""
        self.check_texts(given, names)
        return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one, **salt} for one in given]

    def check_texts(self, given: Sequence[Any], names: Sequence[str]) -> None:
        """Raise ApiError for a text that is too long to be made tokens, be it only to be cut then."""
        most = max(_MAX_TEXT, self._max_characters())
        for one, name in zip(given, names, strict=True):
            if isinstance(one, str) and len(one) > most:
                field = name.partition("[")[0]
                raise ApiError(400, f"{name}: has {len(one)} characters, and {most} are the most.", field)

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        self._check_length(len(text), "prompt")
        if self._tokenizer is None:
            raise RequestError("prompt: no tokenizer is loaded, so a prompt must be token ids, not text")
        return encode_prompt(self._tokenizer, text) if add_special_tokens else encode_rendered(self._tokenizer, [text])

    def chat_prompt(
        self, body: Any, max_tokens: int | None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[PromptType, str]:
        """The prompt of a body of /v1/chat/completions, and what the template has written.

        max_tokens: of the answer.  tools: that the template is told of.
        """
        if body.add_special_tokens:
            raise ApiError(400, "add_special_tokens: the chat template writes them.", "add_special_tokens")
        salt = cache_salt(body.cache_salt)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            kwargs["documents"] = body.documents
        if body.reasoning_effort is not None:
            self._reason(body.reasoning_effort, kwargs, tools)
        chat = self.render(body, kwargs, tools)
        token_ids = chat.token_ids
        if body.truncate_prompt_tokens is not None:
            if chat.images:
                raise ApiError(
                    400, "truncate_prompt_tokens: is not served together with images.", "truncate_prompt_tokens"
                )
            token_ids = self._truncated(token_ids, body.truncate_prompt_tokens, max_tokens)
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids, **salt}
        if chat.images:
            prompt["multi_modal_data"] = chat.multi_modal_data
        if body.mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = body.mm_processor_kwargs
        return prompt, chat.text

    def render(
        self,
        body: Any,
        template_kwargs: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatPrompt:
        """Messages through the chat template."""
        most = max(MAX_EXTRA, self._max_characters())
        values = check_size([template_kwargs], 0, most, "chat_template_kwargs")
        values = check_size([tools], values, most, "tools")
        extras = [_extras(message) for message in body.messages]
        check_size(extras, values, most, "messages")
        _check_messages(body.messages, self.ignored_fields)
        self._check_length(_characters(body.messages), "messages")
        opened = bool(body.continue_final_message)
        try:
            chat = render_chat(
                self._tokenizer,
                body.messages,
                image_marker=self._sight.marker if self._sight else None,
                lay_out=self._sight.written if self._sight else None,
                numbered=self._sight.numbered if self._sight else None,
                other_markers=self._sight.words if self._sight else {},
                chat_template=self._config.chat_template,
                add_generation_prompt=not opened if body.add_generation_prompt is None else body.add_generation_prompt,
                continue_final_message=opened,
                tools=tools,
                template_kwargs=template_kwargs,
                max_characters=self._max_characters(),
            )
        except TooManyCharactersError as error:
            raise self._too_long(error.characters, "messages") from None
        self._note_keys(body.messages, self._template(tools))
        return chat

    def alone(self, body: Any) -> dict[str, Any]:
        """The prompt of messages for a model that makes a vector of a text or of an image, and has no template."""
        for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name):
                raise ApiError(400, f"{name}: this model has no chat template: a message is a text or an image.", name)
        if self._config.chat_template is not None:
            raise ApiError(400, "messages: --chat-template was given, and this model takes none: start it without.")
        _check_messages(body.messages, self.ignored_fields)
        self._check_length(_characters(body.messages), "messages")
        return prompt_alone(body.messages, self._sight is not None)

    def shows_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template has a place for tools."""
        return "tools" in template_variables(self._template(tools))

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        return template_of(self._tokenizer, self._config.chat_template, tools)

    def _note_keys(self, messages: Sequence[Mapping[str, Any]], template: str) -> None:
        """Messages go to the template as they are; of a key that it does not have in it, it makes nothing."""
        keys: set[str] = set()
        for message in messages:
            keys.update(key for key, value in message.items() if value not in (None, [], {}))
            if len(keys) > _MAX_NAMED:
                break
        self.ignored_fields |= {
            f"messages[].{key}"
            for key in keys - {"role", "content", "tool_calls", "function_call"}
            if not any(name in template for name in names_in_templates(key))
        }

    def _reason(self, effort: str, kwargs: dict[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Tell the template how much to reason, in the words that it knows, if it knows any."""
        known = template_variables(self._template(tools))
        name = next((name for name in ("reasoning_effort", *_SWITCHES) if name in known), None)
        if name is None:
            self.ignored_fields.add("reasoning_effort")
            return
        value: Any = effort != "none" if name in _SWITCHES else effort
        if kwargs.setdefault(name, value) != value:
            raise ApiError(
                400, f"reasoning_effort: is not what chat_template_kwargs says of {name}; give one of them.",
                "reasoning_effort",
            )  # fmt: skip

    def _check_length(self, characters: int, field: str) -> None:
        """Before anything is tokenized: no text of more characters can fit, whatever it is."""
        if characters > self._max_characters():
            raise self._too_long(characters, field)

    def _too_long(self, characters: int, field: str) -> ContextLengthError:
        least = -(-characters // self._longest_token())
        return ContextLengthError(self._max_model_len, least, field=field, at_least=True)

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


def cache_salt(salt: str | None) -> dict[str, str]:
    """What a prompt has of it. Raises ApiError."""
    if salt is None:
        return {}
    if not 0 < len(salt) <= _MAX_SALT:
        raise ApiError(400, f"cache_salt: must have 1 to {_MAX_SALT} characters.", "cache_salt")
    return {"cache_salt": salt}


def completion_prompts(body: Any, most: int) -> list[Any]:
    """The prompts of a body of /v1/completions: embeddings as dicts, and then those of `prompt`. Raises ApiError."""
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    if not embeds:
        return several(body.prompt, most)
    for field, why in _NOT_WITH_EMBEDS.items():
        if getattr(body, field) not in (None, False):
            raise ApiError(400, f"{field}: is not served with prompt_embeds: {why}.", field)
    texts = [] if body.prompt in (None, "", []) else several(body.prompt, most)
    if len(embeds) + len(texts) > most:
        raise ApiError(
            400, f"prompt_embeds: with prompt, {len(embeds) + len(texts)} prompts; the limit is {most}.", "prompt"
        )
    return [*({"prompt_embeds": one} for one in embeds), *texts]


def several(prompt: Any, most: int) -> list[Any]:
    """One prompt or several -> several. Raises ApiError for none, and for more than `most`."""
    if prompt is None or prompt == []:
        raise ApiError(400, "prompt: is empty; it must have at least one token.", "prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > most:
        raise ApiError(400, f"prompt: has {len(prompts)} prompts, and the limit is {most}.", "prompt")
    return prompts


def _extras(message: Mapping[str, Any]) -> list[Any]:
    """What a message has beside its texts and images, which are counted elsewhere: keys of parts, and its own."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    named = [list(part) if isinstance(part, Mapping) else part for part in parts]
    return [named, {key: value for key, value in message.items() if key != "content"}]


def check_size(given: Sequence[Any], values: int, most: int, field: str) -> int:
    """Count values, `values` before them among these, and characters, names included. Raises ApiError for too many.

    What goes to a template is made JSON in one go, for which everybody waits: and others' templates run after it.
    """
    held, characters = list(given), 0
    while held:
        value = held.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, (list, Mapping)):
            values += len(value)
            if values <= _MAX_VALUES:
                held.extend(value)
                held.extend(value.values() if isinstance(value, Mapping) else ())
        if values > _MAX_VALUES or characters > most:
            raise ApiError(
                400,
                f"{field}: hold too much for a chat template, beside the texts: {_MAX_VALUES} values are the most, and "
                f"{most} characters.",
                field,
            )
    return values


def _check_messages(messages: Sequence[Mapping[str, Any]], ignored_fields: set[str]) -> None:
    """Refuse what the model should see and would not; what else is on parts goes into `ignored_fields`.

    The messages' form is the renderer's to check. Their own further keys go to the template.
    """
    contents = [message.get("content") for message in messages]
    parts = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise ApiError(400, f"messages: have {parts} parts, and the limit is {MAX_PARTS}.", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.get("audio"):
            raise ApiError(
                400,
                f"{where}.audio: is that of an answer, and answers are texts; give an input_audio part.",
                "messages",
            )
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping):
                _check_part(f"{where}.content[{place}]", part, ignored_fields)


def _check_part(where: str, part: Mapping[str, Any], ignored_fields: set[str]) -> None:
    known = _PART_KEYS.get(str(part.get("type")))
    if known is None:
        return
    _check_keys(where, part, known | {"type"}, "messages[].content[]", ignored_fields)
    if isinstance(part.get("audio"), list):
        raise ApiError(
            400, f"{where}.audio: samples do not come as JSON: give a file, as input_audio or audio_url.", "messages"
        )
    image = part.get("image_url")
    if isinstance(image, Mapping):
        _check_keys(f"{where}.image_url", image, {"url", "detail"}, "messages[].content[].image_url", ignored_fields)


def _check_keys(where: str, given: Mapping[str, Any], known: set[str], path: str, ignored_fields: set[str]) -> None:
    for key in sorted(given.keys() - known):
        if given[key] is None:
            continue
        if key in _CONTENTS:
            raise ApiError(400, f"{where}.{key}: a part has one content, which its type names.", "messages")
        if key in _SIZES:
            raise ApiError(400, f"{where}.{key}: give it in mm_processor_kwargs, for all images.", "messages")
        if len(ignored_fields) < _MAX_NAMED:
            ignored_fields.add(f"{path}.{key}")
    detail = given.get("detail")
    if "detail" not in known or detail is None:
        return
    if detail not in _DETAILS:
        raise ApiError(
            400, f"{where}: detail is auto, high or low: images are seen as the model's processor makes them.",
            "messages",
        )  # fmt: skip
    if detail == "low":
        ignored_fields.add(f"{path}.detail")


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
