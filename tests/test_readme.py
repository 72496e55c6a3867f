"""README and docs/python.md show only what runs: Python from examples/, outputs of today's code, a picture of a run."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.server.api_server import ServerProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
THE_PAGE = ("README.md", "docs/page.md")
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# A ```python block, and the ``` block of what it prints.
SHOWN = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
# What the bundled model answers without sampling: the same on every instruction set.
EXACT = {"server.py": 2, "images.py": 2, "image_prompts.py": 1, "adapters.py": 5, "chat.py": 1, "clip.py": 1,
         "prompt_embeds.py": 1}  # fmt: skip


def shown(*pages: str) -> dict[str, tuple[str, str]]:
    files = {(ROOT / "examples" / name).read_text(): name for name in EXAMPLES}
    blocks = [block for page in pages for block in SHOWN.findall((ROOT / page).read_text())]
    return {files[code]: (code, output) for code, output in blocks}


def test_every_example_is_shown() -> None:
    readme, rest = shown("README.md"), shown("docs/python.md")
    assert set(readme) == {"generate.py", "images.py", "adapters.py", "server.py"}
    assert not set(readme) & set(rest) and {*readme, *rest} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Draws and beams depend on the instruction set in their last bits: of these only the form is compared."""
    program = ROOT / "examples" / name
    if name == "server.py":  # what the page starts beside it, on another port
        code, url = program.read_text(), request.getfixturevalue("served").url
        program = tmp_path / name
        program.write_text(code.replace("http://localhost:8000", url))
        assert url in program.read_text()
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    printed, told = result.stdout.splitlines(), shown("README.md", "docs/python.md")[name][1].splitlines()
    assert len(printed) == len(told)
    exact = EXACT.get(name, 0)
    assert printed[:exact] == told[:exact]


@pytest.fixture(scope="module")
def served() -> ServerProcess:
    with ServerProcess(OMP_NUM_THREADS="1") as server:
        yield server


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_three_commands_lead_to_the_page() -> None:
    """The same ones in README and docs, with the time that they take; there is no fourth."""
    blocks = [re.search(r"^\n((?: {4}.*\n)+)", (ROOT / page).read_text(), re.MULTILINE) for page in THE_PAGE]
    first, second = [[line.partition("#")[0].split() for line in found[1].splitlines()] for found in blocks if found]
    assert first == second
    assert [command[:2] for command in first] == [["git", "clone"], ["pip", "install"], ["quire", "serve"]]
    assert (ROOT / Path(first[1][3]).name).is_file()  # in the clone's folder
    for page in THE_PAGE:
        text = (ROOT / page).read_text()
        assert "the first release on" in text and "http://localhost:8000" in text
        assert re.search(r"\d+ minutes", text.partition("![")[0])


def test_the_picture_is_of_the_commands_that_its_script_runs() -> None:
    """And of what quire prints; and it fetches nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import record_terminal
    finally:
        sys.path.pop(0)
    (target,) = re.findall(r"!\[[^]]*\]\((.*?\.svg)\)", README)
    drawn = (ROOT / target).read_text()
    assert not re.findall(r"""(?:url\(|href=|src=)["']?(?!#)""", drawn)
    text = text_of(drawn, character_width=record_terminal._CHAR_WIDTH)
    assert all(f"$ {command}\n" in text for command in record_terminal.COMMANDS)
    for line in shown("README.md")["adapters.py"][1].splitlines()[:3]:
        assert f": {line}\n" in text


def text_of(drawn: str, character_width: float) -> str:
    """The lines of a drawn terminal. Blanks have no elements of their own, only places."""
    lines: dict[float, str] = {}
    for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text"):
        if "-title" not in one.attrib["class"]:
            row, column = float(one.attrib["y"]), round(float(one.attrib["x"]) / character_width)
            lines[row] = lines.get(row, "").ljust(column) + (one.text or "").replace("\N{NO-BREAK SPACE}", " ")
    return "".join(f"{lines[row]}\n" for row in sorted(lines))
