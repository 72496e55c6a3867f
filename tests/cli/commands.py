"""Running the command `quire`, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.rich_utils  # noqa: F401 (it reads TERMINAL_WIDTH when it is imported: before any test sets that)
from click.testing import Result
from typer.testing import CliRunner

from quire.cli.app import app
from quire.server import launch


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def fresh(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m quire` in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if k not in ("QUIRE_KERNELS", "QUIRE_ISA")}
    return subprocess.run(
        [sys.executable, "-m", "quire", *args],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
    )


class Served:
    """`quire serve`, up to the point where it would serve."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self._tasks: list[launch.Task] = []
        monkeypatch.setattr(launch, "serve", self._take)
        for name in [name for name in os.environ if name.startswith(("QUIRE_", "VLLM_"))]:
            monkeypatch.delenv(name)

    def _take(self, task: launch.Task) -> int:
        self._tasks.append(task)
        return 0

    def run(self, *args: str, yaml: str | None = None, **environment: str) -> Result:
        if yaml is not None:
            file = self._folder / "quire.yaml"
            file.write_text(yaml, encoding="utf-8")
            args = ("--config", str(file), *args)
        return CliRunner().invoke(app, ["serve", *args], env={"COLUMNS": "500", **environment})

    def __call__(self, *args: str, yaml: str | None = None, **environment: str) -> launch.Task:
        result = self.run(*args, yaml=yaml, **environment)
        assert result.exit_code == 0, result.output
        return self._tasks.pop()

    def complaint(self, *args: str, yaml: str | None = None, **environment: str) -> str:
        result = self.run(*args, yaml=yaml, **environment)
        assert result.exit_code == 2 and not self._tasks, result.output
        return result.output
