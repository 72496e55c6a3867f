"""For who comes from vLLM: its arguments that quire does not have.

They are taken where they ask for nothing else than what is done, with one line that says so, and refused with the
reason where not. docs/from-vllm.md has them all.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from quire.config.vllm_names import ANYTHING, BOTH, NAMES, Door, Name
from quire.errors import QuireError

_LONGEST_SHOWN = 60  # characters of a value

_BY_DOOR: dict[Door, dict[str, Name]] = {door: {one.name: one for one in NAMES if door in one.doors} for door in BOTH}


def beside(door: Door) -> Iterable[Name]:
    """The names at a door that are no settings of quire's."""
    return (one for one in _BY_DOOR[door].values() if one.status != "served")


def check(door: Door, name: str, value: Any) -> None:
    """Raise QuireError, with the reason, for a value that asks for something that is not done."""
    found = _BY_DOOR[door].get(name)
    if found is None or found.status == "served":
        raise KeyError(name)
    if not found.takes(value):
        raise QuireError(f"{name}={_shown(value)}: {found.why}{_taken(found, '; what may be given is ')}.")


def take(door: Door, given: Mapping[str, Any], known: Iterable[str] = ()) -> str | None:
    """Check arguments that quire does not have; return the line to be logged about those that were taken.

    known: names that quire has, for the message about one that nobody has. Raises QuireError; TypeError for that.
    """
    for name, value in given.items():
        try:
            check(door, name, value)
        except KeyError:
            names = [*known, *_BY_DOOR[door]]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"unknown argument: {name}{hint}") from None
    taken = [f"{name}={_shown(value)}" for name, value in given.items() if value is not None]
    return f"taken, as they ask for nothing else than what is done: {', '.join(taken)}" if taken else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _taken(one: Name, lead: str) -> str:
    """The values that are taken, if those are some."""
    if ANYTHING in one.values:
        return ""
    shown = [json.dumps(value) for value in one.values if not isinstance(value, set)]
    return f"{lead}{', '.join(shown)}" if shown else ""


def table() -> str:
    """The names as a table in Markdown, one line for each."""
    lines = ["| name | `LLM()` | `quire serve` | |", "|---|---|---|---|"]
    for name in sorted({one.name for one in NAMES}):
        here = [(door, _BY_DOOR[door][name]) for door in BOTH if name in _BY_DOOR[door]]
        status = {door: one.status for door, one in here}
        notes = dict.fromkeys(_note(one) for _, one in here)
        cells = [f"`{name}`", *(status.get(door, "-") for door in BOTH), " ".join(note for note in notes if note)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _note(one: Name) -> str:
    text = f"{one.why}." if one.why else ""
    if text.split(" ")[0].rstrip(".").isalpha() and not text.startswith("quire"):
        text = text[0].upper() + text[1:]
    if one.status == "served":
        return text
    if ANYTHING in one.values:
        return f"Any value. {text}"
    values = [f"`{json.dumps(value)}`" for value in one.values if not isinstance(value, set)]
    return f"{text} Taken: {', '.join(values)}." if values else text
