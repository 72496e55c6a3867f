"""The page's output is what its sources make, and its sources keep their rules."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "page"
OUTPUT = ROOT / "quire" / "server" / "page"
MOST_LINES = 300


def stamp(folder: Path) -> str:
    """As page/build.mjs has it: names, lengths and contents of all that the output is made of."""
    found = hashlib.sha256()
    inside = sorted(p.relative_to(folder).as_posix() for p in (folder / "src").rglob("*") if p.is_file())
    for name in ["build.mjs", "package.json", "package-lock.json", "tsconfig.json", *inside]:
        content = (folder / name).read_bytes()
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def test_the_output_is_of_these_sources() -> None:
    written = (OUTPUT / "stamp.txt").read_text().strip()
    assert written == stamp(SOURCES), "page/ has changed: run `make page` and commit quire/server/page too"


def test_the_stamp_sees_every_change(tmp_path: Path) -> None:
    copied = tmp_path / "page"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("node_modules"))
    assert stamp(copied) == stamp(SOURCES)
    for name in ("src/main.tsx", "package-lock.json"):
        (copied / name).write_bytes((copied / name).read_bytes() + b" ")
        assert stamp(copied) != stamp(SOURCES)
        shutil.copy(SOURCES / name, copied / name)
    (copied / "src" / "new.ts").touch()
    assert stamp(copied) != stamp(SOURCES)


@pytest.mark.slow
def test_the_output_is_byte_for_byte_what_is_built(tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node: the stamp alone was compared")
    copied = tmp_path / "page"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("node_modules"))
    got = subprocess.run(["npm", "ci", "--loglevel=error"], cwd=copied, capture_output=True, text=True, timeout=300)
    if got.returncode and re.search(r"ENOTFOUND|EAI_AGAIN|ECONN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH", got.stderr):
        pytest.skip(f"npm reaches no registry: {got.stderr[-300:]}")
    assert got.returncode == 0, got.stderr
    subprocess.run(["npm", "run", "--silent", "check"], cwd=copied, check=True, timeout=300)
    subprocess.run(["npm", "test", "--silent"], cwd=copied, check=True, timeout=300)
    subprocess.run(["node", "build.mjs", str(tmp_path / "built")], cwd=copied, check=True, timeout=300)
    built = {path.name: path.read_bytes() for path in (tmp_path / "built").iterdir()}
    assert built == {path.name: path.read_bytes() for path in OUTPUT.iterdir()}


def test_sources_are_short_and_set_no_html() -> None:
    files = [path for path in (SOURCES / "src").rglob("*") if path.suffix in (".ts", ".tsx", ".css")]
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        name = path.relative_to(SOURCES).as_posix()
        assert len(text.splitlines()) <= MOST_LINES or path.suffix == ".css", f"{name} has more than {MOST_LINES} lines"
        assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function\(", text), (
            name
        )


def test_the_output_names_no_other_host() -> None:
    """Nothing is fetched from anybody else; names of XML's spaces are no addresses."""
    for name in ("index.html", "page.js", "page.css"):
        hosts = set(re.findall(r"https?://[\w.-]+", (OUTPUT / name).read_text()))
        assert hosts <= {"http://www.w3.org"}, name


def test_the_lock_file_names_no_host() -> None:
    """Packages come from the registry that whoever builds has, and are known by their digests."""
    text = (SOURCES / "package-lock.json").read_text()
    assert "://" not in re.sub(r'"url": "[^"]*"', "", text)  # where to give money
    packages = json.loads(text)["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)
