"""The families' data files; `all_rows` has them by architecture."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from tests.models.rows.row import ModelRow

_OTHERS = ("row", "checks", "oracles")


@cache
def all_rows() -> dict[str, ModelRow]:
    """Of every file here but the tests: each has a tuple `ROWS`."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    files = [name for name in names if name not in _OTHERS and not name.startswith(("test_", "conftest"))]
    found = [row for name in files for row in import_module(f"{__name__}.{name}").ROWS]
    table = {row.architecture: row for row in found}
    assert len(table) == len(found)
    return table


def entry(architecture: str) -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
    """A row in the form that the table of `tests.models.tiny` has."""
    row = all_rows()[architecture]
    return row.config, dict(row.base), {name: dict(settings) for name, settings in row.variants.items()}
