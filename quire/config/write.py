"""`python -m quire.config.write` writes what is made of the tables anew: arguments' types, and two pages of docs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

from quire.config import from_vllm
from quire.config.from_vllm import beside
from quire.config.setting import Group, Kind, Setting
from quire.config.settings import SETTINGS, at, engine_settings

_ROOT = Path(__file__).parents[2]
TYPES = Path(__file__).parent / "typed_arguments.py"
SETTINGS_PAGE = _ROOT / "docs" / "settings.md"
VLLM_PAGE = _ROOT / "docs" / "from-vllm.md"

_BEGIN, _END = "<!-- made by quire.config.write -->", "<!-- end -->"

_HEAD = '''"""The arguments of `LLM()` as types, for editors and mypy. `python -m quire.config.write` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


'''


def typed_arguments() -> str:
    """The text of `typed_arguments.py`."""
    engine = [row for row in engine_settings() if row.name != "model" and "LLM" in row.doors]
    more = [row for row in at("LLM") if row not in engine and row.name != "model"]
    theirs = sorted(one.name for one in beside("LLM") if one.values)
    return _HEAD + "\n\n".join(
        [
            _typed_dict("EngineArguments", "TypedDict", "What an engine is made with.", map(_typed, engine)),
            _typed_dict(
                "LLMArguments",
                "EngineArguments",
                "What `LLM` takes: vLLM's arguments come last, those of which some value is taken.",
                [*map(_typed, more), *(f"{name}: Any" for name in theirs)],
            ),
        ]
    )


def _typed_dict(name: str, base: str, text: str, fields: Iterator[str] | list[str]) -> str:
    return (
        "\n".join([f"class {name}({base}, total=False):", f'    """{text}"""', "", *(f"    {one}" for one in fields)])
        + "\n"
    )


def _typed(row: Setting) -> str:
    return f"{row.name}: {_spelled(row.argument_type | None)}"


def _spelled(kind: object) -> str:
    """A type as it is written in a file that imports its names."""
    alternatives = getattr(kind, "__args__", ()) if isinstance(kind, types.UnionType) else (kind,)
    names = [
        one.__name__ if isinstance(one, type) and not hasattr(one, "__args__") else str(one) for one in alternatives
    ]
    text = " | ".join("None" if name == "NoneType" else name for name in names)
    for module in ("collections.abc.", "typing.", "pathlib."):
        text = text.replace(module, "")
    return text.replace("object]", "Any]")


def settings_page(text: str) -> str:
    """docs/settings.md with its tables as they are to be."""
    return _with_made(text, "\n\n".join(_group(group) for group in Group))


def vllm_page(text: str) -> str:
    """docs/from-vllm.md with its table as it is to be."""
    return _with_made(text, from_vllm.table())


def _with_made(text: str, made: str) -> str:
    head, _, rest = text.partition(_BEGIN)
    return f"{head}{_BEGIN}\n{made}\n{_END}{rest.partition(_END)[2]}"


def _group(group: Group) -> str:
    lines = [f"## {group}", "", "| setting | value | default | taken by | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line(row) for row in SETTINGS if row.group is group)])


def _line(row: Setting) -> str:
    doors = [{"LLM": "`LLM`", "serve": "`serve`"}[door] for door in ("LLM", "serve") if door in row.doors]
    cells = [f"`{row.name}`", _value(row), row.shown_default or _switch(row), ", ".join(doors), _text(row)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(row: Setting) -> str:
    if row.choices:
        return ", ".join(f"`{choice}`" for choice in row.choices)
    return f"{row.kind.value}, in GiB" if row.metavar == "GIB" else _unit(row)


def _unit(row: Setting) -> str:
    return "seconds" if row.metavar == "SECONDS" else row.kind.value


def _switch(row: Setting) -> str:
    return {True: "on", False: "off"}[row.default] if row.kind is Kind.SWITCH else ""


def _text(row: Setting) -> str:
    others = [*row.all_flags[1:], *row.variables] if "serve" in row.doors else []
    also = f" Also {', '.join(f'`{other}`' for other in others)}." if others else ""
    return f"{row.help} {row.more}".strip() + also


def write() -> None:
    TYPES.write_text(typed_arguments(), encoding="utf-8")
    for path, made in ((SETTINGS_PAGE, settings_page), (VLLM_PAGE, vllm_page)):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
