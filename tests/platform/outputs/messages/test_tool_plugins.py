"""The package of docs/tool-calling.md, found by its names as an installed one is; and the page's tables."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import quire
from quire.errors import QuireError
from quire.platform.outputs.messages.message_format import REASONING_FORMATS, MessageFormat, formats_of
from quire.platform.outputs.messages.tool_formats import FORMATS
from tests.platform.outputs.messages.reading import message_of, tools

TESTS = Path(__file__).parents[3]
PACKAGE = TESTS / "tool_package"
PAGE = (TESTS.parent / "docs" / "tool-calling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)
MODEL = SimpleNamespace(chat_template="")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would write of its entry points, on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    about = tmp_path / "quire_internlm-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()) for group, points in groups]
    (about / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(PACKAGE / "src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quire_internlm", raising=False)


def test_the_page_shows_the_very_package() -> None:
    code = PACKAGE / "src" / "quire_internlm" / "__init__.py"
    toml, python = BLOCKS
    assert (toml, python) == ((PACKAGE / "pyproject.toml").read_text(), code.read_text())


def test_formats_of_a_package_read_and_shape_calls(installed: None) -> None:
    assert "quire_internlm" not in sys.modules
    internlm = formats_of(MODEL, tool_parser="internlm")
    assert internlm.tools is not None and isinstance(internlm.tools, quire.ToolFormat)
    text = 'Wait.\n<|action_start|><|plugin|>\n{"name": "get_time", "parameters": {"a": 1}}<|action_end|>'
    message = message_of(internlm, text)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("get_time", '{"a": 1}')]
    assert message.content == "Wait."
    made = internlm.constraint(tools(choice="required"))
    assert made is not None and made.structural_tag is not None
    assert made.structural_tag["format"]["tags"][0]["begin"].startswith("<|action_start|><|plugin|>\n{")

    for name in ("lines", "quire_internlm:LINES"):
        lines = formats_of(MODEL, tool_parser=name)
        message = message_of(lines, 'Well: CALL get_time {"a": [1]}\nCALL get_time {} CALLS CALL me')
        assert [(call.name, call.arguments) for call in message.tool_calls] == [
            ("get_time", '{"a": [1]}'),
            ("get_time", "{}"),
        ]
        assert message.content == "Well: \n CALLS CALL me"


def test_a_format_of_reasoning_of_a_package(installed: None) -> None:
    assert "quire_internlm" not in sys.modules
    for name in ("aloud", "quire_internlm:ALOUD"):
        found = formats_of(MODEL, reasoning_parser=name)
        assert isinstance(found.reasoning, quire.ReasoningFormat) and found.tools is None
        message = message_of(found, "<aloud>Hm.</aloud>\nYes.", tools(choice="none"))
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")
    both = formats_of(MODEL, tool_parser="lines", reasoning_parser="aloud")
    message = message_of(both, "<aloud>CALL me</aloud>CALL get_time {}")
    assert message.reasoning == "CALL me" and [call.name for call in message.tool_calls] == ["get_time"]
    with pytest.raises(QuireError, match=r"reasoning_parser: .*derived from quire\.ReasoningFormat"):
        formats_of(MODEL, reasoning_parser="quire_internlm:LINES")
    with pytest.raises(QuireError, match=r"reasoning_parser: 'lines' is none of .*; installed: aloud"):
        formats_of(MODEL, reasoning_parser="lines")
    with pytest.raises(QuireError, match="reasoning_parser: 'quire_internlm:NO' cannot be imported: AttributeError"):
        formats_of(MODEL, reasoning_parser="quire_internlm:NO")


def test_what_is_no_format_is_refused(installed: None) -> None:
    with pytest.raises(QuireError, match=r"not an object of a class derived from quire\.ToolFormat"):
        formats_of(MODEL, tool_parser="quire_internlm:Lines")
    with pytest.raises(QuireError, match="installed: internlm, lines"):
        formats_of(MODEL, tool_parser="nobody")


def test_the_page_s_tables_are_the_formats() -> None:
    def rows(heading: str) -> list[list[str]]:
        part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        lines = [line.replace("\\|", "¦") for line in part.splitlines() if line.startswith("| `")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    def names(cell: str) -> list[str]:
        return re.findall(r"`([\w.]+)`", cell)

    described = rows("Calls of tools")
    assert [names(row[0]) for row in described] == [[one.name, *one.aliases] for one in FORMATS]
    for row, one in zip(described, FORMATS, strict=True):
        shaped = MessageFormat(one).constraint(tools()) is not None
        assert row[1] == one.families
        assert row[3:5] == ["yes" if one.signs else "no", "yes" if shaped else "no"]
        assert row[5] == ("no" if one.name == "openai" else "yes")
    thoughts = rows("Reasoning")
    assert [names(row[0]) for row in thoughts] == [[one.name, *one.aliases] for one in REASONING_FORMATS]
    for row, one in zip(thoughts, REASONING_FORMATS, strict=True):
        want = [one.families, f"`{one.begins[0]}`", f"`{one.ends[0]}`"]
        assert [cell.replace("¦", "|") for cell in row[1:]] == want
