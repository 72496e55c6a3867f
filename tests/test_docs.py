"""What README and docs name is there: files, and the targets of `make`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
_PATH = re.compile(
    r"(?<![\w/.-])(?:quire|tests|benchmarks|training|examples|scripts|csrc|clients|deploy|docs)/[\w./*-]*\w"
)
_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
_TARGET = re.compile(r"(?<![\w-])make ([a-z]+(?:-[a-z]+)*)(?=[`\s])")
# Files that docs/adding-a-kernel.md says to write.
TO_WRITE = {"csrc/cpu/rows/scale_rows.cpp", "csrc/cuda/rows/scale_rows.cu"}
_CODE = re.compile(r"`([^`\n]*)`|^(?:    )?(make .*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {path for path in _PATH.findall(text) if "." in Path(path).name}
    assert not {path for path in named - TO_WRITE if not list(ROOT.glob(path))}
    links = {target for target in _LINK.findall(text) if not target.startswith("/")}
    assert not {target for target in links if not (page.parent / target).exists()}


def test_names_are_found_at_all() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(_PATH.findall(text)) > 100 and len(_LINK.findall(text)) > 50 and len(_TARGET.findall(text)) > 10


def test_the_help_of_make_lists_every_target_that_pages_name() -> None:
    told = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^  make ([a-z-]+) ", told, re.MULTILINE))
    phony = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets == {name for line in phony for name in line.split()}
    shown = "".join(
        (ROOT / file).read_text() for file in ("README.md", "CONTRIBUTING.md", "docs/installation.md", ".ci/run")
    )
    code = "\n".join("".join(found) for found in _CODE.findall(shown))
    assert {"setup", "test", "lint"} <= set(_TARGET.findall(f"{code}\n")) <= targets
