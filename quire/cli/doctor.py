"""`quire doctor`: what quire will run on, what is missing, and the way out."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.options import Json
from quire.cli.terminal import console

if TYPE_CHECKING:
    from quire.cli.probes import Findings


def doctor(as_json: Json = False) -> None:
    """Say what quire runs on, and what is missing.

    Each thing that is missing comes with the way to get it. Exit code 1: quire
    cannot run.
    """
    if not _show(as_json):
        raise typer.Exit(1)


def _show(as_json: bool) -> bool:
    """Examine and print; return whether quire can run."""
    from quire.cli.probes import examine

    found = examine()
    if as_json:
        print(
            json.dumps(
                {
                    "can_run": found.can_run,
                    **found.sections,
                    "problems": [asdict(problem) for problem in found.problems],
                },
                indent=2,
            )
        )
    else:
        _print(found)
    return found.can_run


def _print(found: Findings) -> None:
    out = console()
    for section, values in found.sections.items():
        out.print(section, style="bold")
        for name, value in values.items():
            label = name.removesuffix("_bytes").replace("_", " ")
            out.print(f"  {label:<20}{_readable(name, value)}", markup=False)
    for problem in found.problems:
        style = "bold red" if problem.fatal else "yellow"
        kind = "error" if problem.fatal else "note"
        out.print(f"{kind}: {problem.what} {problem.way_out}", style=style, markup=False)
    if found.can_run:
        out.print("quire can run.", style="green")
    else:
        out.print("quire cannot run.", style="bold red")


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if name.endswith("bytes"):
        return f"{value / 1e9:.1f} GB"
    return str(value)
