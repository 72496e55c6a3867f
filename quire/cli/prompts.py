"""Prompts from the command line or standard input."""

from __future__ import annotations

import sys

from quire.errors import QuireError


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


def undecodable(error: UnicodeDecodeError) -> QuireError:
    """What to raise for input that is in another encoding."""
    return QuireError(
        f"standard input is not {error.encoding} (byte 0x{error.object[error.start]:02x} at place {error.start}): "
        "convert it, with iconv for example."
    )
