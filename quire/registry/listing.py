"""The registry for people: what is served, from which package, and which plug-ins cannot be."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from quire import registry
from quire.errors import UnsupportedModelError


def listing() -> list[dict[str, Any]]:
    """A dict for each row; its "problem" is None, or why the row cannot be served.

    Only the classes of plug-ins are imported: quire's own need torch, which takes seconds. Behind the rows come the
    decoders that run through transformers' own module, whose "promise" says what of them is quire's and what torch's.
    """
    table = registry.rows()
    claims = Counter(row.architecture for row in table)
    own = {row.architecture for row in registry.BUILT_IN}
    rows = [
        {
            "architecture": row.architecture,
            "capabilities": sorted(row.capabilities),
            "class": row.target,
            "package": row.package or "quire",
            "replaces_quires_own": row.package is not None and row.architecture in own,
            "problem": _problem(row, claims[row.architecture]),
            "promise": None,
        }
        for row in sorted(table, key=lambda row: row.architecture)
    ]
    named = {row.architecture for row in table}
    others = {name: found["runs"] for name, found in without_a_row().items() if "runs" in found and name not in named}
    return rows + [
        {
            "architecture": name,
            "capabilities": sorted(registry.FALLBACK.capabilities),
            "class": registry.FALLBACK.target,
            "package": "transformers",
            "replaces_quires_own": False,
            "problem": None,
            "promise": promise,
        }
        for name, promise in others.items()
    ]


@cache
def without_a_row() -> dict[str, Any]:
    """Transformers' causal families: {"runs": what is whose}, {"refused": why} or {"untried": why}, by architecture."""
    text = (Path(__file__).parent / "families.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


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
