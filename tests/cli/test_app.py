"""The command `quire` itself."""

from __future__ import annotations

from typer.testing import CliRunner

import quire
from quire.cli.app import app
from tests.cli.commands import fresh, invoke


def test_help_names_every_command() -> None:
    text = invoke("--help")
    for command in ("run", "models", "doctor", "bench"):
        assert command in text
        assert "Usage" in invoke(command, "--help")


def test_python_m_quire_is_the_command() -> None:
    assert fresh("--version").stdout == f"quire {quire.__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2
