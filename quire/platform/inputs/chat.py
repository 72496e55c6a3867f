"""Chat messages to prompt token ids, through the tokenizer's chat template.

The template runs in a sandboxed process (`chat_renderer.py`), which sees no image: to a template an image is
{"type": "image"}, or the text of the model's image token. Templates are of three forms (`_form_of`): those that want a
message's content as a text, those that want a list of parts, and those that take either.

What a user typed never becomes an image token. Where it contains that token's text, an unguessable number takes its
place while the template runs, and the text is encoded without regard to the token; that as many tokens come out as
images went in is checked last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from quire.errors import RequestError
from quire.multimodal.sources import MediaSource
from quire.platform.inputs.chat_call_form import call_form
from quire.platform.inputs.chat_messages import check_messages, check_template_kwargs, for_template, tool_schemas
from quire.platform.inputs.chat_renderer import RENDERER, TemplateError
from quire.platform.inputs.chat_tools import CallForm, fit_calls
from quire.platform.inputs.numbered import NumberedMarkers
from quire.platform.inputs.tokenizer import encode_rendered, token_id_of
from quire.platform.inputs.typed_markers import TypedMarkers
from quire.types import MediaKind

MAX_TEMPLATE = 1 << 20

# Words that no template writes of its own accord: a text, and what shows only where a part is written as it is.
_PROBE, _BESIDE_IT = "quireprobe7c1e", "quirebeside7c1e"
_FORMS_KEPT = 32
_DEVELOPER = "developer"

Form = Literal["text", "parts", "either"]


class TooManyCharactersError(RequestError):
    """What a template has rendered is longer than its caller takes."""

    def __init__(self, characters: int) -> None:
        super().__init__(f"messages: the chat template makes {characters} characters of them; shorten them.")
        self.characters = characters


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """A prompt as the input processor takes it.

    token_ids: each image stands there as one image token.
    images: their sources, in the order of these tokens: what `quire.multimodal.images.load_picture` takes, or
        {"image_embeds": tensor}; videos and sounds among them are `MediaSource`s; what has a uuid, a `NamedMedia`.
    text: what the template has written.
    """

    token_ids: list[int]
    images: list[Any]
    text: str

    @property
    def multi_modal_data(self) -> dict[str, list[Any]] | None:
        """As prompts have it."""
        found: dict[str, list[Any]] = {}
        for one in self.images:
            found.setdefault(_kind_of(one), []).append(one.source if isinstance(one, MediaSource) else one)
        return found or None


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    image_marker: str | None = None,
    lay_out: Callable[[Sequence[str], int], list[str]] | None = None,
    numbered: NumberedMarkers | None = None,
    other_markers: Mapping[MediaKind, str] = MappingProxyType({}),
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_characters: int | None = None,
) -> ChatPrompt:
    """The prompt of OpenAI-shaped messages.

    image_marker: the text of the model's image token; None refuses images. other_markers: the same of further kinds.
    lay_out: as of `ImageInputSpec.written`; None: the text stays as the template has written it. numbered: what images
    are called in texts, where they have numbers.
    chat_template: used instead of the tokenizer's own; or the name of one of those, where it has several.
    add_generation_prompt: end with what opens the assistant's answer.
    continue_final_message: leave the last message open instead, for the model to continue.
    tools: JSON schemas, or functions that transformers can describe.  template_kwargs: more variables for the
    template, as JSON values.
    max_characters: of the rendered text; a longer one is refused before it is made tokens.

    The template writes the special tokens: BOS is not added a second time. Raises RequestError for malformed
    messages, a tokenizer without a template, a template that fails or exceeds a limit, and one that does not write
    each image once; TooManyCharactersError, which is one, for too long a text.
    """
    markers: dict[MediaKind, str] = {} if image_marker is None else {"image": image_marker}
    markers.update(other_markers)
    pieces, typed, images = _render(
        tokenizer,
        messages,
        markers,
        numbered,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        template_kwargs=template_kwargs,
    )
    characters = sum(map(len, pieces))
    if max_characters is not None and characters > max_characters:
        raise TooManyCharactersError(characters)
    counts = Counter(map(_kind_of, images))
    written = pieces if lay_out is None else lay_out(pieces, counts["image"])
    stretches = None if numbered is None else numbered.encode(tokenizer, written, typed, counts["image"])
    token_ids = encode_rendered(tokenizer, written, typed) if stretches is None else stretches
    for kind, marker in markers.items():
        _check_count(tokenizer, token_ids, marker, counts[kind], kind)
    return ChatPrompt(token_ids, images, _joined(pieces, typed))


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    image_marker: str | None = None,
    numbered: NumberedMarkers | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """The text that `render_chat` makes tokens of, by the same options."""
    markers: dict[MediaKind, str] = {} if image_marker is None else {"image": image_marker}
    pieces, typed, _ = _render(
        tokenizer, messages, markers, numbered, add_generation_prompt=add_generation_prompt, **options
    )
    return _joined(pieces, typed)


def _joined(pieces: Sequence[str], typed: Sequence[str]) -> str:
    return "".join(part for pair in zip(pieces, [*typed, ""], strict=True) for part in pair)


def _kind_of(source: Any) -> MediaKind:
    kind: MediaKind = getattr(source, "kind", "image")  # which those have that are no images, or have a uuid
    return kind


def _render(
    tokenizer: Any,
    messages: Any,
    markers: Mapping[MediaKind, str],
    numbered: NumberedMarkers | None,
    *,
    add_generation_prompt: bool,
    chat_template: str | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[str], list[Any]]:
    """The rendered text, cut where a user typed a marker; which one at each cut; and the sources of media."""
    if tokenizer is None:
        raise RequestError("chat needs a tokenizer, and none is loaded: give token ids, or load one.")
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message needs add_generation_prompt=False: they exclude each other.")
    others = [kind for kind in markers if kind != "image"]
    checked, images = check_messages(messages, "image" in markers, others)
    schemas, more = tool_schemas(tools), check_template_kwargs(template_kwargs)
    template = template_of(tokenizer, chat_template, tools)
    special = tokenizer.special_tokens_map
    told = any(message["role"] == _DEVELOPER for message in checked)
    if told and not _writes_developer(template, json.dumps(special)):
        checked = [{**each, "role": "system"} if each["role"] == _DEVELOPER else each for each in checked]
    form = _form_of(template, json.dumps(special), bool(markers))
    if any(message["role"] == "tool" or message.get("tool_calls") for message in checked):
        checked = fit_calls(checked, _call_form(checked, template, json.dumps(special), form == "parts"), template)
    typed = TypedMarkers(markers.values(), "" if numbered is None else numbered.pattern)
    checked, schemas, more = (typed.hide(given) for given in (checked, schemas, more))
    words = _Words(markers, numbered)
    for message in checked:
        message["content"] = _content(message["content"], form, words)
    checked = [for_template(message, template) for message in checked]
    variables = {
        **special,
        **more,
        "messages": checked,
        "tools": schemas,
        "documents": more.get("documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = RENDERER.render(template, variables)
    except TemplateError as error:  # which may quote what a user typed
        raise TemplateError(typed.shown(str(error))) from None
    if continue_final_message:
        text = _cut_after_final(text, checked[-1].get("content"))
    return *typed.cut(text), images


def template_of(tokenizer: Any, given: str | None = None, tools: Sequence[Any] | None = None) -> str:
    """The template given, by itself or by its name, or the tokenizer's; of several named ones the one for tools, or
    the default.

    Raises RequestError where there is none.
    """
    template = given
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping) and isinstance(given, str) and "{" not in given:
        if given not in own:
            raise RequestError(f"no chat template is called {given!r}; the tokenizer has {', '.join(sorted(own))}.")
        template = own[given]
    if template is None:
        if own is None:
            raise RequestError(
                "this model's tokenizer has no chat template, as those of models that only continue text: pass "
                "chat_template=... (quire serve --chat-template FILE), or a ready prompt to generate() (POST "
                "/v1/completions)."
            )
        try:
            template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
        except ValueError as error:
            raise RequestError(f"no chat template fits: {error}") from error
    if not isinstance(template, str):
        raise RequestError("chat_template must be a string of Jinja.")
    if len(template) > MAX_TEMPLATE:
        raise RequestError(f"the chat template has {len(template)} characters, the limit is {MAX_TEMPLATE}.")
    return template


@lru_cache(maxsize=_FORMS_KEPT)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a template reads; found in the sandbox, as parsing costs too. Raises RequestError."""
    return frozenset(RENDERER.variables(template))


@lru_cache(maxsize=_FORMS_KEPT)
def _writes_developer(template: str, special: str) -> bool:
    """Whether a message of OpenAI's role "developer" is written, and neither refused nor left out without a word.

    Where it is not, it counts as the system's message, as whose new name OpenAI introduced it.
    """
    user = {"role": "user", "content": "a"}
    return any(
        _shows_probe(template, special, content, _DEVELOPER, [user])
        for content in (_PROBE, [{"type": "text", "text": _PROBE, _BESIDE_IT: ""}])
    )


@lru_cache(maxsize=_FORMS_KEPT)
def _form_of(template: str, special: str, sees: bool = True) -> Form:
    """Which form of content the template wants, found by giving it both.

    special: the tokenizer's special tokens as JSON (text can be a key of the cache). sees: whether messages may have
    images; a text is preferred where there are none.
    """
    if not sees and _shows_probe(template, special, _PROBE):
        return "text"
    if not _shows_probe(template, special, [{"type": "text", "text": _PROBE, _BESIDE_IT: ""}]):
        return "text"
    return "either" if _shows_probe(template, special, _PROBE) else "parts"


def _call_form(messages: Sequence[Mapping[str, Any]], template: str, special: str, parts: bool) -> CallForm:
    """The form in which the template takes these messages' calls. Raises RequestError where it writes none."""
    form = call_form(template, special, parts)
    first = next((index for index, message in enumerate(messages) if message.get("tool_calls")), None)
    if form is None and first is not None:
        raise RequestError(
            f"messages[{first}].tool_calls: this model's chat template writes no calls of tools, so that the model "
            "would not see them. Give a chat_template that does (quire serve --chat-template FILE)."
        )
    return form or CallForm()


def _shows_probe(
    template: str, special: str, content: Any, role: str = "user", others: Sequence[Mapping[str, Any]] = ()
) -> bool:
    """Whether the template writes the text of the content, and not Python's or JSON's way of writing the parts.

    role: of the message that has this content; others: messages that follow it.

    A template that is stopped at its limits raises: nothing is known of it, and it is not to be remembered.
    """
    variables = {
        **json.loads(special),
        "messages": [{"role": role, "content": content}, *others],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    try:
        text = RENDERER.render(template, variables)
    except TemplateError:
        return False
    return _PROBE in text and _BESIDE_IT not in text


class _Words:
    """The markers of media, one after the other, as texts have them."""

    def __init__(self, markers: Mapping[MediaKind, str], numbered: NumberedMarkers | None) -> None:
        self._markers = markers
        self._numbered = numbered
        self._count = 0

    def next(self, kind: MediaKind) -> str:
        if kind != "image" or self._numbered is None:
            return self._markers[kind]
        self._count += 1
        return self._numbered.word(self._count)


def _content(parts: list[str | MediaSource | None] | None, form: Form, words: _Words) -> Any:
    """A message's parts (None is an image, a `MediaSource` another kind) as the template wants them.

    A template that takes either gets a list only where it must: some take one from users, and expect the system's
    message to be a text. Content None is nothing that a template could iterate over, or test for being a text: it is
    left out, or no parts.
    """
    if form == "text":
        written = (part if isinstance(part, str) else words.next(_kind_of(part)) for part in parts or ())
        return None if parts is None else "\n".join(written)
    parts = parts or []
    texts = [part for part in parts if isinstance(part, str)]
    if form == "either" and len(parts) < 2 and len(texts) == len(parts):
        return "".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": _kind_of(part)} for part in parts]


def _cut_after_final(text: str, content: Any) -> str:
    """The rendering up to the end of the last message's content."""
    if isinstance(content, list):
        content = content[-1].get("text") if content else None
    trimmed = (content or "").strip()
    if not trimmed:
        raise RequestError("continue_final_message needs a last message with text in it, and at its end.")
    for ending in (content, content.rstrip(), trimmed):  # templates may strip what they are given
        at = text.rfind(ending)
        if at >= 0:
            return text[: at + len(ending)]
    raise RequestError("continue_final_message: the chat template changes the last message's content.")


def _check_count(tokenizer: Any, token_ids: list[int], marker: str, images: int, kind: MediaKind) -> None:
    image_id = token_id_of(tokenizer, marker)
    if image_id is None and images:
        raise RequestError(f"the tokenizer has no token {marker!r}, which stands for {kind}s: load the model's own.")
    written = token_ids.count(image_id) if image_id is not None else 0
    if written != images:
        raise RequestError(
            f"the chat template wrote {written} {kind} marker{'s' * (written != 1)} for {images} "
            f"{kind}{'s' * (images != 1)}: {marker!r} must come from {kind} parts alone, and from each of them once."
        )
