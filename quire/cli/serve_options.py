"""The options of `quire serve`, made of the table of settings, and what their values mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer

from quire.config.setting import Kind, Setting

_TYPES: dict[Kind, Any] = {
    Kind.WHOLE: int | None,
    Kind.NUMBER: float | None,
    Kind.SWITCH: bool | None,
    Kind.TEXTS: list[str] | None,
}
_METAVARS = {
    Kind.TEXT: "TEXT", Kind.WHOLE: "N", Kind.NUMBER: "N", Kind.SIZE: "N", Kind.TEXTS: "TEXT...", Kind.OBJECT: "JSON",
    Kind.LIMITS: "image=N",
}  # fmt: skip
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def option_type(setting: Setting) -> Any:
    """What typer reads a setting as. What is not a type of typer's is read as text, and by `meaning` after that."""
    return _TYPES.get(setting.kind, str | None)


def option(setting: Setting) -> Any:
    """A setting as typer has options."""
    flags = list(setting.all_flags)
    if setting.kind is Kind.SWITCH and not _is_plain(setting):
        flags[0] += f"/--no-{setting.flag[2:]}"
    variables = [setting.variable, *setting.variables] if setting.variables else setting.variable
    return typer.Option(*flags, help=setting.help, envvar=variables)


def shown(setting: Setting) -> tuple[str, str]:
    """Its line of help: the flag with what belongs to it, and the text."""
    text = setting.help if setting.shown_default is None else f"{setting.help} [{setting.shown_default}]"
    if setting.kind is Kind.SWITCH:
        return setting.flag if _is_plain(setting) else f"--[no-]{setting.flag[2:]}", text
    metavar = setting.metavar or _METAVARS[setting.kind]
    several = "..." if setting.kind is Kind.TEXTS and setting.metavar else ""
    return f"{setting.flag} {metavar}{several}", text


def _is_plain(setting: Setting) -> bool:
    """A switch that is off unless it is given, as its name says that something is turned off."""
    return setting.name.startswith("disable_")


def meaning(setting: Setting, given: Any) -> Any:
    """The argument that an option's value stands for. None: it was not given. Raises BadParameter."""
    if given is None or setting.kind in (Kind.WHOLE, Kind.NUMBER, Kind.SWITCH):
        return given
    if setting.kind is Kind.SIZE:
        return _size(setting, given)
    if setting.kind is Kind.TEXTS:
        return _list(setting.flag, given)
    if setting.kind in (Kind.OBJECT, Kind.LIMITS):
        return _object(setting, given)
    if not setting.choices:
        return given
    if given.lower() not in setting.choices:
        raise typer.BadParameter(f"{setting.flag} {given!r}: is {' or '.join(setting.choices)}.")
    return given.lower()


def _size(setting: Setting, text: str) -> Any:
    if setting.convert is not None and setting.convert(text) is None:
        return text  # a word, such as auto
    number, factor = text, 1
    if text[-1:] in _SUFFIXES:
        number, factor = text[:-1], _SUFFIXES[text[-1]]
    try:
        return int(number) if factor == 1 else int(float(number) * factor)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{setting.flag} {text!r}: must be a whole number; k is a thousand, K is 1024, and so on to t and T."
        ) from None


def _object(setting: Setting, text: str) -> Mapping[str, Any]:
    if setting.kind is Kind.LIMITS and "=" in text and not text.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in text.split(",")]
        if len({name.strip() for name, _, _ in pairs}) == len(pairs) and all(
            name.strip() and number.strip().isdecimal() for name, _, number in pairs
        ):
            return {name.strip(): int(number) for name, _, number in pairs}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{setting.flag} must be a {setting.kind.value}, not {text!r}.")
    return value


def _list(flag: str, values: list[str]) -> list[str] | None:
    """Several values; a JSON list of them counts as its entries, as in vLLM."""
    taken: list[str] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError:  # its text is not repeated: it may be a key
            raise typer.BadParameter(f"{flag}: begins with '[' and is no JSON list.") from None
        taken += [json.dumps(one) if isinstance(one, dict) else str(one) for one in parsed]
    return taken or None
