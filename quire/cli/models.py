"""`quire models`: what the registry serves, and which plug-ins cannot."""

from __future__ import annotations

import json

from quire.cli.options import Json
from quire.cli.terminal import console, errors_in_one_line


def models(as_json: Json = False) -> None:
    """List the architectures that quire serves, with plug-ins'."""
    with errors_in_one_line():
        _show(as_json)


def _show(as_json: bool) -> None:
    """Print the rows."""
    from quire.registry.listing import listing

    listed = listing()
    if as_json:
        print(json.dumps(listed, indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("architecture", "serves", "from", "")
    for row in listed:
        note = "replaces quire's own" if row["replaces_quires_own"] else ""
        if row["promise"]:
            note = f"torch's own: {', '.join(row['promise']['torch']) or 'no sums'}"
        if row["problem"]:
            note = f"[red]broken: {escape(row['problem'])}[/]"
        table.add_row(row["architecture"], ", ".join(row["capabilities"]), escape(row["package"]), note)
    console().print(table)
