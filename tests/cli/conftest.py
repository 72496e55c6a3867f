"""The fixtures of tests/server/fixtures.py, and those of several commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Served
from tests.server.fixtures import *  # noqa: F403


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Served:
    return Served(monkeypatch, tmp_path)


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "quire_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.models]\nBrokenForCausalLM = quire_broken:Broken\n")
    (tmp_path / "quire_broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
