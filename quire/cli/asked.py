"""What a command is asked, told from its words. Nothing heavy is imported: what is wrong with them is said at once."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from quire.checkpoint import smollm2
from quire.errors import QuireError

_WEB = ("http://", "https://", "data:")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Task:
    """What the arguments ask for.

    model None: the bundled one. prompt None: none yet, ask for it. images: paths of files, or URLs. adapters: whom to
    ask, by folder or name; none: the model itself.
    """

    model: str | None
    prompt: str | None
    chat: bool
    raw: bool
    images: Sequence[str] = ()
    adapters: Sequence[str] = ()

    @classmethod
    def from_words(
        cls,
        words: list[str],
        chat: bool | None,
        raw: bool,
        images: Sequence[str] = (),
        adapters: Sequence[str] = (),
    ) -> Task:
        """Tell the model from the prompt by the number of words; read stdin where that is the prompt."""
        if chat and len(adapters) > 1:
            raise QuireError("--chat takes one --lora: a conversation is with one of them (/lora changes that).")
        if len(words) > 2:
            raise QuireError(f"{len(words)} arguments: quote the prompt, as in quire run MODEL 'a prompt'.")
        if chat:
            model, prompt = [*words, None, None][:2]
            return cls(model, stdin_text(raw) if prompt == "-" else prompt, True, raw, images, adapters)
        model, prompt = [None, None, *words][-2:]
        if len(words) == 1:
            _check_prompt(words[0])
        if prompt is None and chat is None and not raw and sys.stdin.isatty():
            return cls(model, None, True, raw, images, adapters)
        return cls(model, stdin_text(raw) if prompt in (None, "-") else prompt, False, raw, images, adapters)


def _check_prompt(word: str) -> None:
    """One word is the prompt, and not a model that was left without one."""
    way_out = "add a prompt, or '-' to read it from stdin, or --chat"
    # os.path's answer is no, where Path's may be an OSError: a long prompt is no name of a file
    if word == smollm2.NAME or (word and os.path.isfile(os.path.join(word, "config.json"))):
        raise QuireError(f"{word} is a model: {way_out}.")
    if _HUB_ID.fullmatch(word):
        raise QuireError(f"{word} looks like a model's name: {way_out}. (As a prompt: echo {word} | quire run)")


def stdin_text(raw: bool) -> str:
    """The prompt on standard input. Raises QuireError where there is none."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise undecodable(error) from None
    # The newline that a shell's echo adds would change what the model continues.
    text = text.removesuffix("\n") if raw else text.strip()
    if not text:
        raise QuireError("no prompt: give it as an argument or on standard input.")
    return text


def text_or_stdin(prompt: str | None) -> str | None:
    """A prompt to be continued as it is: "-", or none, is standard input's; None where somebody sits there."""
    if prompt not in (None, "-"):
        return prompt
    return None if prompt is None and sys.stdin.isatty() else stdin_text(raw=True)


def one_of(name: str, value: str | None, other: str, same: str | None) -> str | None:
    """What may be given in two ways. Raises QuireError where both were taken and differ."""
    if value is not None and same is not None and value != same:
        raise QuireError(f"{name} is {value!r} and {other} {same!r}: give one of them.")
    return value if value is not None else same


def undecodable(error: UnicodeDecodeError) -> QuireError:
    """What to raise for input that is in another encoding."""
    return QuireError(
        f"standard input is not {error.encoding} (byte 0x{error.object[error.start]:02x} at place {error.start}): "
        "convert it, with iconv for example."
    )


def read_image(source: str) -> str | bytes:
    """A URL of the web, and a data: URL, as they are; of a file, its bytes. Raises QuireError."""
    if source.lower().startswith(_WEB):
        return source
    path = url2pathname(urlsplit(source).path) if source.lower().startswith("file:") else source
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # "~nobody", and a name with a NUL in it
        raise QuireError(f"{source[:200]}: {getattr(error, 'strerror', None) or error}") from None


def picture_part(source: str, data: str | bytes) -> dict[str, Any]:
    """The part of a message that has this picture, in OpenAI's form: by its URL, or its bytes in a data: URL.

    Raises QuireError for bytes that are no picture.
    """
    url = data if isinstance(data, str) else f"data:{_kind(source, data)};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _kind(source: str, data: bytes) -> str:
    """As in Content-Type, by the file's first bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.get_format_mimetype() or "image/png"
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        raise QuireError(f"{source[:200]} is no picture that can be read.") from None
