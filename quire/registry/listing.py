"""The registry for people: what is served, from which package, and which plug-ins cannot be."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire import registry
from quire.errors import UnsupportedModelError


def listing() -> list[dict[str, Any]]:
    """A dict for each row; its "problem" is None, or why the row cannot be served.

    Only the classes of plug-ins are imported: quire's own need torch, which takes seconds.
    """
    table = registry.rows()
    claims = Counter(row.architecture for row in table)
    own = {row.architecture for row in registry.BUILT_IN}
    return [
        {
            "architecture": row.architecture,
            "capabilities": sorted(row.capabilities),
            "class": row.target,
            "package": row.package or "quire",
            "replaces_quires_own": row.package is not None and row.architecture in own,
            "problem": _problem(row, claims[row.architecture]),
        }
        for row in sorted(table, key=lambda row: row.architecture)
    ]


def _problem(row: registry.Row, claims: int) -> str | None:
    if claims > 1:
        return f"{claims} packages claim this architecture: uninstall all but one"
    if row.package is None:
        return None
    try:
        registry.load_class(row)
    except UnsupportedModelError as error:
        return str(error)
    return None
