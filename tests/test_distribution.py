"""The distribution is `quire-llm`: on PyPI, `quire` is another project. The import and the command are `quire`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URL = PROJECT["urls"]["Homepage"]

_INSTALLS = re.compile(r"\b(?:pip3?|pipx|uv tool) (?:install|download|wheel)\b|\buv add\b|\bpipx run\b|\buvx\b")
# What a command that installs is given ends with its line, its backticks or its shell's next command.
_END = re.compile(r"`|&&|\|\||;|#|\n")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def texts() -> Iterator[tuple[str, str]]:
    """All text files of the tree, but for this one; not what git does not know."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and path != Path(__file__) and path.stat().st_size < 1_000_000:
            try:
                yield name, path.read_text()
            except UnicodeDecodeError:  # a picture
                continue


def installed(text: str) -> Iterator[str]:
    """The name of every distribution that a text says to install; of a path, its beginning."""
    text = text.replace("\\\n", " ")
    for match in _INSTALLS.finditer(text):
        words = _END.split(text[match.end() :], maxsplit=1)[0].split()
        for word in words:
            name = _NAME.match(word.strip("\"'([{."))
            if name and not word.startswith(("-", ".", "/", "'.", '".')):
                yield name[0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install quire", ["quire"]),
        ("`python -m pip install -U 'quire[smollm2]>=1'`, and", ["quire"]),
        ("    uv add torch \\\n      quire && pip install .", ["torch", "quire"]),
        ("pip install quire-llm  # not quire", ["quire-llm"]),
        ("pip install './quire[dev]'; quire run", []),
        ('pipx install "quire_llm"', ["quire_llm"]),
    ],
)
def test_the_reading_of_commands_sees_names(text: str, names: list[str]) -> None:
    assert list(installed(text)) == names


def test_nobody_is_told_to_install_another_project() -> None:
    told = [(file, name) for file, text in texts() for name in installed(text)]
    assert len(told) > 5
    assert not [(file, name) for file, name in told if re.fullmatch(r"(?i)quire", name)]


def test_nothing_depends_on_another_project() -> None:
    projects = [tomllib.loads(text).get("project", {}) for file, text in texts() if file.endswith(".toml")]
    lists = [
        one for file, text in texts() if file.endswith(".md") for one in re.findall(r"dependencies = (\[.*?\])", text)
    ]
    wanted = [name for project in projects for name in project.get("dependencies", [])]
    assert "quire-llm" in wanted  # the tests' plug-in package
    assert not [name for name in [*wanted, *lists] if re.search(r"""(?:^|["'])quire(?:["'\[<>=~ ]|$)""", name)]


def test_the_distribution_has_its_name() -> None:
    assert PROJECT["name"] == "quire-llm"
    assert PROJECT["scripts"] == {"quire": "quire.cli.app:app"}


def test_all_files_name_the_same_address() -> None:
    """Of the project's home; who moves it finds all places here."""
    assert all(url == URL or url.startswith(f"{URL}/") for url in PROJECT["urls"].values())
    named = [
        (file, found) for file, text in texts() for found in re.findall(r"https://github\.com/[\w-]+/quire\b", text)
    ]
    assert {found for _, found in named} == {URL}


def page_files() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "quire" / "server" / "page").iterdir()}


def test_git_has_the_page_that_the_wheel_takes() -> None:
    assert len(page_files()) >= 6
    listed = subprocess.run(["git", "ls-files", "quire/server/page"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    assert set(listed.stdout.split()) == page_files()


@pytest.mark.slow
def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    """Built as pip does, but for the kernels."""
    options = ["--no-deps", "-C", "wheel.cmake=false", "-C", f"build-dir={tmp_path / 'build'}", "-w", str(tmp_path)]
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *options, str(ROOT)], capture_output=True, text=True, timeout=600
    )
    if "No matching distribution" in made.stderr or "Connection" in made.stderr:
        pytest.skip(f"pip fetched no scikit-build-core: {made.stderr[-300:]}")
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("quire_llm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert page_files() <= names and "quire/demo/picture.png" in names
    assert not [name for name in names if "node_modules" in name or name.startswith("page/")]
