"""Versions: quire's own in one place, Python's the same everywhere, and what is pinned can be installed there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import quire

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def found(pattern: str, file: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / file).read_text()))


PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
WORKFLOW = ".github/workflows/ci.yml"


def test_quires_version_is_written_once() -> None:
    """Wheels take it from quire/__init__.py, by the regular expression of scikit-build-core."""
    assert "version" not in PROJECT["project"] and PROJECT["project"]["dynamic"] == ["version"]
    source = PROJECT["tool"]["scikit-build"]["metadata"]["version"]
    assert source == {"provider": "scikit_build_core.metadata.regex", "input": "quire/__init__.py"}
    assert found(r'(?m)^__version__ = "(.+)"$', source["input"]) == {quire.__version__}
    assert found(r"/quire:(\S+)", "deploy/kubernetes.yaml") == {quire.__version__}


def test_the_command_and_the_distribution_have_that_version() -> None:
    command = [sys.executable, "-m", "quire", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"quire {quire.__version__}\n"
    assert metadata.version(PROJECT["project"]["name"]) == quire.__version__, "after a change of it: make setup"


def test_all_name_the_oldest_python() -> None:
    assert re.fullmatch(r"3\.\d+", OLDEST)
    major, minor = OLDEST.split(".")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"
    assert PROJECT["tool"]["mypy"]["python_version"] == OLDEST
    assert f"Programming Language :: Python :: {OLDEST}" in PROJECT["project"]["classifiers"]
    assert found(r"Python (\d+\.\d+) or newer", "README.md") == {OLDEST}
    assert found(r'python-version: "(.+)"', WORKFLOW) == {OLDEST}
    assert found(r"Python (\d+\.\d+) or newer", "Makefile") == {OLDEST}
    assert found(r"version_info < \((\d+), (\d+)\)", "Makefile") == {(major, minor)}
    for file, pattern in [("Dockerfile", r"PYTHON=3\.(\d+)"), ("Makefile", r"PYTHON=python3\.(\d+)")]:
        named = found(pattern, file)
        assert named and all(int(version) >= int(minor) for version in named)


def test_what_is_pinned_runs_on_the_oldest_python() -> None:
    assert {"torch", "transformers", "peft"} <= set(PINS)
    for name, version in PINS.items():
        if metadata.version(name).partition("+")[0] != version:
            continue  # another environment than the one that `make` sets up
        assert SpecifierSet(metadata.metadata(name)["Requires-Python"] or "").contains(f"{OLDEST}.0"), (name, version)


@pytest.mark.parametrize("enough", [True, False])
def test_the_set_up_checks_it(tmp_path: Path, enough: bool) -> None:
    """An interpreter that says it is the oldest, or the one before, and can do nothing but be asked."""
    version = tuple(map(int, OLDEST.split(".")))
    version = (*version, 0) if enough else (version[0], version[1] - 1, 99)
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" -c "{code}" "$2"\nexit 1\n')
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and not (tmp_path / "venv").exists()
    wanted = "cannot make a virtual environment" if enough else f"quire needs Python {OLDEST} or newer"
    assert wanted in done.stderr


def test_hooks_have_the_versions_that_make_has() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    given = dict(one.split("==") for hook in hooks for one in hook.get("additional_dependencies", ()))
    assert {"ruff"} <= set(given) & set(PINS)
    assert not {name for name in set(given) & set(PINS) if given[name] != PINS[name]}
