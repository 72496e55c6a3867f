"""What a caller of chat gives, checked: messages and their parts, tools, variables for the template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from quire.errors import RequestError
from quire.multimodal.sources import MediaSource
from quire.platform.inputs.chat_tools import check_calls
from quire.types import MediaKind

MAX_MESSAGES = 100_000

_ROLE_LENGTH = 64
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
_TEXT = ("text", "input_text")
_URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)
# DeepSeek's templates know an answer of tool calls alone by it.
_NULL_CONTENT = re.compile(r"content['\"]?\]?\s*(is|is\s+not|==|!=)\s+none\b", re.IGNORECASE)
# Where parts have the contents of media.
_CONTENTS = ("image_url", "image", "url", "path", "base64", "image_pil", "image_embeds", "video_url", "video",
             "input_audio", "audio_url", "audio")  # fmt: skip
_FORMAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,31}")
_ASK = "ask for it for all videos of the request"
_CUT = "cut the file, or choose frames of all videos of the request"
# Where clients write into a video's part what their own libraries honour there, and what to do instead.
_CHOICES = {
    **dict.fromkeys(("fps", "num_frames", "do_sample_frames", "min_pixels", "max_pixels"), _ASK),
    **dict.fromkeys(("nframes", "min_frames", "max_frames", "sample_fps"), "ask for num_frames or fps of all videos"),
    **dict.fromkeys(("total_pixels", "resized_height", "resized_width"), "ask for max_pixels or size of all videos"),
    **dict.fromkeys(("video_start", "video_end"), _CUT),
}
# What clients and templates call the reasoning before an answer; the first is the usual one.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def check_messages(
    messages: Any, takes_images: bool = False, others: Collection[MediaKind] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages as plain dicts, and the sources of their images, and of their videos and sounds, in order.

    The content of each is a list of parts: a text, None for an image, or an empty `MediaSource` of the others; content
    None stays None (an assistant may have made tool calls only). A source is what
    `quire.multimodal.images.load_picture` takes, {"image_embeds": tensor}, or a `MediaSource`; or one of these under
    its uuid. others: kinds that the model takes beside images.

    Raises RequestError naming the message's index, and the part's index and type.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            "messages must be a list of messages, [{'role': ..., 'content': ...}]: "
            f"a conversation of one message is a list too; {type(messages).__name__} was given."
        )
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries; it must have 1 to {MAX_MESSAGES}.")
    images: list[Any] = []
    taken: tuple[MediaKind, ...] = ("image", *others) if takes_images else tuple(others)
    return [_check_message(index, message, taken, images) for index, message in enumerate(messages)], images


def _check_message(index: int, message: Any, taken: Collection[MediaKind], images: list[Any]) -> dict[str, Any]:
    """The message with its content as parts; appends its images' sources to `images`."""
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"messages[{index}] must be an object with 'role' and 'content'.")
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _ROLE_LENGTH:
        raise RequestError(f"messages[{index}].role must be a string of 1 to {_ROLE_LENGTH} characters.")
    message = check_calls(index, message)
    content = message.get("content")
    parts: list[str | MediaSource | None] | None = None
    if isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = []
        for place, part in enumerate(content):
            text, source = _check_part(f"messages[{index}].content[{place}]", part, taken)
            kind: MediaKind = getattr(source, "kind", "image")
            parts.append(text if kind == "image" else MediaSource(kind, None))
            if text is None:
                images.append(source)
    elif content is None and role != "assistant":
        raise RequestError(f"messages[{index}].content is missing.")
    elif content is not None:
        raise RequestError(f"messages[{index}].content must be a string or a list of parts.")
    return {**message, "content": parts}


def for_template(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as transformers gives it to a template.

    Without keys whose value is null, which many templates would write as "None", and with the reasoning under the names
    that templates have for it. A content that is null stays where the template asks for that.
    """
    asks = _NULL_CONTENT.search(template) is not None
    given = {key: value for key, value in message.items() if value is not None or (key == "content" and asks)}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def names_in_templates(key: str) -> tuple[str, ...]:
    """What a template may call a key of a message."""
    return _REASONING if key in _REASONING else (key,)


def _check_part(where: str, part: Any, taken: Collection[MediaKind]) -> tuple[str | None, Any]:
    """A text part's text and None; None and another part's source."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise RequestError(f"{where} must be an object with a 'type', as {{'type': 'text', 'text': ...}}.")
    if kind in _TEXT:
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.text must be a string.")
        return str(part["text"]), None
    if not taken:
        raise RequestError(f"{where} is of type {kind[:40]!r}, and this model takes text only.")
    if kind in _OTHER_SOURCES:
        medium, read = _OTHER_SOURCES[kind]
        if medium not in taken:
            raise RequestError(f"{where} is of type {kind!r}, and this model takes no {medium}.")
        if medium == "video":
            _check_choices(where, part)
        if part.get("uuid") is None:
            return None, MediaSource(medium, read(where, part))
        return None, _by_uuid(where, part, read, medium)
    if kind in _SOURCES and "image" not in taken:
        raise RequestError(f"{where} is of type {kind!r}, and this model takes no image.")
    if kind not in _SOURCES:
        raise RequestError(
            f"{where} is of type {kind[:40]!r}; this version of quire takes "
            f"{', '.join((*_TEXT, *_SOURCES, *_OTHER_SOURCES))}."
        )
    return None, _by_uuid(where, part, _SOURCES[kind], "image")


def _by_uuid(
    where: str, part: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], Any], kind: MediaKind
) -> Any:
    """A part's source, under the part's uuid where it has one: what is known by that need not come again."""
    if part.get("uuid") is None:
        return read(where, part)
    from quire.multimodal.uuids import named  # which brings torch

    contents = [part[name] for name in _CONTENTS if part.get(name) is not None]
    empty = all(isinstance(one, Mapping) and not one for one in contents)
    return named(part["uuid"], None if empty else read(where, part), kind, where)


def _from_url(where: str, part: Mapping[str, Any]) -> str:
    """OpenAI's {"url": ..., "detail": ...}, or the URL itself; `detail` is OpenAI's own affair."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise RequestError(f"{where}.image_url must be a URL, as {{'url': 'https://...'}} or as a string.")
    return url


def _from_pil(where: str, part: Mapping[str, Any]) -> Image.Image:
    image = part.get("image_pil")
    if not isinstance(image, Image.Image):
        raise RequestError(f"{where}.image_pil must be a PIL image, not {type(image).__name__}.")
    return image


def _from_image(where: str, part: Mapping[str, Any]) -> Any:
    """Hugging Face's way: the image under one of several names."""
    given = [name for name in ("image", "url", "path", "base64") if part.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{where} must have either an 'image' or a 'url'; it has {' and '.join(given) or 'neither'}."
        )
    name, source = given[0], part[given[0]]
    if name == "path":
        raise RequestError(
            f"{where}.path is not read: give a file: URL (within allowed_local_media_path) as 'url', or the opened "
            "PIL image as 'image'."
        )
    if name == "base64":
        raise RequestError(f"{where}.base64 is not taken: give it as a 'url', data:image/png;base64,...")
    if name == "url" and not isinstance(source, str):
        raise RequestError(f"{where}.url must be a URL as a string, not {type(source).__name__}.")
    if not isinstance(source, (str, bytes, bytearray, memoryview, np.ndarray, Image.Image)):
        raise RequestError(
            f"{where}.image must be a PIL image, a numpy array, bytes or a URL, not {type(source).__name__}."
        )
    return source


def _from_embeds(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    embeds = part.get("image_embeds")
    if not hasattr(embeds, "is_sparse"):  # a tensor, without importing torch to ask
        raise RequestError(f"{where}.image_embeds must be a tensor, not {type(embeds).__name__}.")
    grid = part.get("image_grid_thw")
    return {"image_embeds": embeds} if grid is None else {"image_embeds": embeds, "image_grid_thw": grid}


_SOURCES: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "image_url": _from_url,
    "input_image": _from_url,
    "image": _from_image,
    "image_pil": _from_pil,
    "image_embeds": _from_embeds,
}


def _check_choices(where: str, given: Mapping[str, Any]) -> None:
    """What a part says of how its frames are to be chosen and treated is not passed over."""
    name = next((name for name in given if name in _CHOICES and given[name] is not None), None)
    if name is not None:
        raise RequestError(
            f"{where}.{name} is not taken of a single part: {_CHOICES[name]}, by mm_processor_kwargs, as "
            f"{{'videos_kwargs': {{'num_frames': 16}}}}."
        )


def _url_of(where: str, name: str, given: Any) -> str:
    """A URL of what may be fetched by the rules of images: a text that is none would be a path of this machine."""
    if isinstance(given, Mapping):
        _check_choices(f"{where}.{name}", given)
        unknown = sorted(str(key)[:40] for key in given if key != "url" and given[key] is not None)
        if unknown:
            raise RequestError(
                f"{where}.{name} takes 'url', and has {', '.join(unknown[:8])} besides: a uuid stands beside {name}, "
                "and settings for all media of the request are its mm_processor_kwargs."
            )
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not _URL.match(url):
        raise RequestError(f"{where}.{name} must be a URL that begins with data:, file:, http: or https:.")
    return url


def _url_part(name: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """OpenAI's shape: {"video_url": {"url": ...}}, or the URL itself."""
    return lambda where, part: _url_of(where, name, part.get(name))


def _from_video(where: str, part: Mapping[str, Any]) -> Any:
    """Hugging Face's way: frames, bytes or a URL as "video", or a URL as "url"."""
    given = [name for name in ("video", "url") if part.get(name) is not None]
    if len(given) != 1:
        raise RequestError(f"{where} must have either a 'video' or a 'url'; it has {' and '.join(given) or 'neither'}.")
    source = part[given[0]]
    return _url_of(where, given[0], source) if given[0] == "url" or isinstance(source, str) else source


def _from_audio(where: str, part: Mapping[str, Any]) -> Any:
    """Hugging Face's way: samples, (samples, rate), bytes or a URL as "audio", or a URL as "url" or "audio_url"."""
    given = [name for name in ("audio", "url", "audio_url") if part.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{where} must have either an 'audio' or a 'url'; it has {' and '.join(given) or 'neither'}."
        )
    source = part[given[0]]
    return _url_of(where, given[0], source) if given[0] != "audio" or isinstance(source, str) else source


def _from_input_audio(where: str, part: Mapping[str, Any]) -> str:
    """OpenAI's {"data": base64 of a file, "format": "wav"}, as a data: URL. What the file is, its bytes say."""
    given = part.get("input_audio")
    data, form = (given.get("data"), given.get("format")) if isinstance(given, Mapping) else (None, None)
    if not isinstance(data, str) or not data:
        raise RequestError(f"{where}.input_audio must be {{'data': base64 of a file, 'format': 'wav'}}.")
    if not isinstance(form, str) or not _FORMAT.fullmatch(form):
        raise RequestError(f"{where}.input_audio.format must be the file's, as 'wav' or 'mp3'.")
    return f"data:audio/{form};base64,{data}"


_OTHER_SOURCES: dict[str, tuple[MediaKind, Callable[[str, Mapping[str, Any]], Any]]] = {
    "video_url": ("video", _url_part("video_url")),
    "video": ("video", _from_video),
    "input_audio": ("audio", _from_input_audio),
    "audio_url": ("audio", _url_part("audio_url")),
    "audio": ("audio", _from_audio),
}


def check_template_kwargs(given: Any) -> dict[str, Any]:
    """The template's further variables. Raises RequestError for names that are the template's own."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"chat_template_kwargs must be a dict of names and JSON values, not {type(given).__name__}.")
    taken = sorted(_OWN_VARIABLES & set(given))
    if taken:
        raise RequestError(f"chat_template_kwargs cannot set {', '.join(taken)}: give it as an argument of its own.")
    return dict(given)


def tool_schemas(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tools as JSON schemas, functions described by transformers. Raises RequestError naming the tool's index."""
    if not tools:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of JSON schemas or functions.")
    schemas = []
    for index, tool in enumerate(tools):
        if isinstance(tool, Mapping):
            schemas.append(dict(tool))
        elif callable(tool):
            from transformers.utils import get_json_schema

            try:
                schemas.append(get_json_schema(tool))
            except Exception as error:
                raise RequestError(f"tools[{index}] cannot be described as a schema: {error}") from error
        else:
            raise RequestError(f"tools[{index}] must be a JSON schema or a function.")
    return schemas
