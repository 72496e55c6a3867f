"""Rows that installed packages bring, read from their metadata without importing them."""

from __future__ import annotations

import logging
import re
from importlib import metadata

from quire.plugins import root_cause
from quire.registry.row import TEXT, Row

GROUP = "quire.models"

logger = logging.getLogger("quire")


def plugin_rows() -> tuple[Row, ...]:
    """Every entry point of the group. Metadata that cannot be read is passed over, with a warning."""
    found: dict[str, list[Row]] = {}
    for distribution in metadata.distributions():
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
            if points:
                # Of two copies of one package, Python imports the one that comes first on the path.
                found.setdefault(distribution.metadata["Name"], [_row(p, distribution) for p in points])
        except Exception as error:  # metadata of any age and origin
            logger.warning("A package's metadata cannot be read, so its models are not seen: %s", root_cause(error))
    return tuple(row for rows in found.values() for row in rows)


def _row(point: metadata.EntryPoint, distribution: metadata.Distribution) -> Row:
    target, extras = re.fullmatch(r"(.*?)\s*(?:\[(.*)\])?\s*", point.value).groups()  # type: ignore[union-attr]
    named = frozenset(name.strip() for name in (extras or "").split(",") if name.strip())
    return Row(point.name, target.replace(" ", ""), named or TEXT, distribution.metadata["Name"])
