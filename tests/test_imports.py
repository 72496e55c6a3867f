"""The rooms' order, and what `import quire` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import quire

PACKAGE = Path(quire.__file__).parent

# Each room may import the rooms on the lines above its own, itself, and nothing else of quire.
FLOORS = [
    {"errors"},
    {"config", "types", "huge_pages", "paths"},
    {"demo"},
    {"kernels"},
    {"registry"},
    {"layers"},
    {"checkpoint"},
    {"models"},
    {"multimodal"},
    {"lora"},
    {"platform"},
    {"server"},
    {"cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Narrower than the order alone says.
ONLY = {
    "errors": set(),
    "types": set(),
    "huge_pages": {"errors"},
    "paths": set(),
    "config": {"errors"},
    "demo": set(),
    "kernels": {"types", "errors"},
    "registry": {"types", "config", "errors"},
    "layers": {"kernels", "types", "errors"},
    "checkpoint": {"config", "errors", "huge_pages"},
    "models": {"checkpoint", "layers", "kernels", "registry", "types", "config", "errors", "huge_pages"},
    "lora": {"models", "checkpoint", "layers", "kernels", "types", "config", "errors", "huge_pages", "paths"},
    "multimodal": {"types", "config", "errors", "paths"},
}
# The package's own, which name what lives in the rooms; and `python -m quire.server`, a door to `quire serve`.
EXEMPT = {PACKAGE / "__init__.py", PACKAGE / "__main__.py", PACKAGE / "server" / "__main__.py"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path, source: str | None = None) -> dict[str, int]:
    """room -> line of every import of quire in a file, be it in a function or under TYPE_CHECKING."""
    package = ["quire", *path.relative_to(PACKAGE).parts[:-1]]
    rooms: dict[str, int] = {}
    for node in ast.walk(ast.parse(source or path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from quire import x`: x may be a room, or a name that the package finds in one.
            names = [module] if module != "quire" else [f"quire.{home(alias.name)}" for alias in node.names]
        rooms.update({name.split(".")[1]: node.lineno for name in names if name.startswith("quire.")})
    return rooms


def home(name: str) -> str:
    return quire._HOME.get(name, f"quire.{name}").split(".")[1]


def breach(room: str, other: str) -> bool:
    if other == room or other.startswith("__"):
        return False
    if room in ONLY:
        return other not in ONLY[room]
    return other not in FLOOR or FLOOR[other] >= FLOOR[room]


def test_imports_run_down_the_table_only() -> None:
    breaches = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path in EXEMPT:
            continue
        room = room_of(path)
        assert room in FLOOR, f"{path.relative_to(PACKAGE)}: the room {room} has no place in this table"
        breaches += [
            f"{path.relative_to(PACKAGE)}:{line}: {room} imports {other}"
            for other, line in imported_rooms(path).items()
            if breach(room, other)
        ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/x.py", "from quire.models.base import CausalLM"),
        ("models/x.py", "def f():\n    import quire.platform.engine.llm_engine"),
        ("models/vision/x.py", "if TYPE_CHECKING:\n    from ...platform import engine"),
        ("lora/x.py", "from quire.multimodal import images"),
        ("multimodal/x.py", "from .. import lora"),
        ("platform/x.py", "from quire.cli.app import app"),
        ("models/x.py", "from quire import LLM"),
        ("config.py", "from quire.types import KVSpec"),
        ("demo/x.py", "from quire.errors import QuireError"),
    ],
)
def test_the_walk_sees_an_upward_import(file: str, source: str) -> None:
    path = PACKAGE / file
    assert any(breach(room_of(path), other) for other in imported_rooms(path, source))


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("module", "limit", "unwanted"),
    [
        ("quire", 0.3, {"torch", "transformers", "numpy", "rich", "typer"}),
        ("quire.cli.app", 0.4, {"torch", "transformers", "numpy"}),  # `quire --help` waits for it
    ],
)
def test_importing_is_quick_and_imports_nothing_heavy(module: str, limit: float, unwanted: set[str]) -> None:
    code = (
        "import json, sys, time; begin = time.perf_counter()\n"
        f"import {module}; seconds = time.perf_counter() - begin\n"
        f"print(json.dumps([seconds, sorted({unwanted!r} & set(sys.modules))]))"
    )
    seconds, heavy = zip(*(json.loads(fresh(code)) for _ in range(5)), strict=True)
    assert not any(heavy)
    assert min(seconds) < limit


def test_every_public_name_resolves() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert set(dir(quire)) >= set(quire.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = quire.absent
