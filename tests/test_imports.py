"""The rooms' order, and what `import quire` costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import quire

PACKAGE = Path(quire.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
# The package's own, which name what lives in the rooms; and `python -m quire.server`, a door to `quire serve`.
DOORS = {"quire", "quire.__main__", "quire.server.__main__"}


class Room(NamedTuple):
    """A line of the table in docs/architecture.md. name: a module; level: 0 is the lowest; may: names of rooms."""

    name: str
    level: int
    may: frozenset[str]


@cache
def rooms() -> dict[str, Room]:
    """The table, by module name. Its last column says what a room may import: all below, or these of them."""
    text = DOCUMENT.read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `quire/([\w/]+?)(?:/|\.py)` \|.*\| ([^|]*) \|$", text, re.M)
    names = ["quire." + path.replace("/", ".") for path, _ in lines]
    short = {name.rpartition(".")[2]: name for name in names}
    found: dict[str, Room] = {}
    for place, (name, (_, cell)) in enumerate(zip(names, lines, strict=True)):
        below = names[place + 1 :]
        listed = [short[one] for one in re.findall(r"`(\w+)`", cell)]
        assert listed or cell in ("all below", "nothing"), f"{name}: the table does not say what it may import"
        assert set(listed) <= set(below), f"{name}: the table lets it import what stands above it"
        may = below if cell == "all below" else listed
        found[name] = Room(name, len(names) - place, frozenset(may))
    return found


def module_of(path: Path) -> str:
    parts = ["quire", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> Room | None:
    """The room that a module lies in; None for the package's own."""
    while module and module not in rooms():
        module = module.rpartition(".")[0]
    return rooms().get(module)


def imports(path: Path, source: str | None = None) -> dict[str, int]:
    """module -> line of every import of quire in a file, be it in a function or under TYPE_CHECKING."""
    package = ["quire", *path.relative_to(PACKAGE).parts[:-1]]
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text() if source is None else source, str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [_named(module, alias.name) for alias in node.names]
        found.update({name: node.lineno for name in names if name.startswith("quire.")})
    return found


def _named(module: str, name: str) -> str:
    """Where `from module import name` takes the name from. What the package finds in a room is that room's."""
    if module == "quire":
        return "" if name.startswith("__") else quire._HOME.get(name, f"quire.{name}")
    inner = f"{module}.{name}"
    return inner if inner in modules() else module


def breach(path: Path, other: str) -> str | None:
    """What is wrong with a file's import of another module."""
    room, target = room_of(module_of(path)), room_of(other)
    assert room is not None and target is not None, f"{path} or {other}: no room in the table of {DOCUMENT.name}"
    if target is room or target.name in room.may:
        return None
    why = "which is above it" if target.level > room.level else "which the table does not say that it may"
    return f"{room.name} imports {other}, {why}"


def test_imports_run_down_the_table_only() -> None:
    breaches = []
    for module, path in modules().items():
        if module in DOORS:
            continue
        if room_of(module) is None:
            assert path.name == "__init__.py" and not path.read_text(), f"{module}: no line of the table has it"
            continue
        for other, line in imports(path).items():
            wrong = breach(path, other)
            breaches += [f"{path.relative_to(PACKAGE)}:{line}: {wrong}"] if wrong else []
    assert not breaches, "\n".join(breaches)


def test_every_room_of_the_table_is_there() -> None:
    assert rooms(), "the table was not found"
    assert set(rooms()) <= set(modules())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/x.py", "from quire.models.base import CausalLM"),
        ("models/x.py", "def f():\n    import quire.platform.engine.llm_engine"),
        ("models/vision/x.py", "if TYPE_CHECKING:\n    from ...platform import engine"),
        ("lora/x.py", "from quire.platform.kv import swap"),
        ("multimodal/x.py", "from .. import lora"),
        ("platform/kv/x.py", "from quire.platform.scheduling.request import SequenceState"),
        ("platform/sampling/x.py", "if TYPE_CHECKING:\n    from quire.platform.outputs.outputs import Logprob"),
        ("platform/scheduling/x.py", "from ..outputs import detokenizer"),
        ("platform/outputs/x.py", "from quire.platform import execution"),
        ("platform/engine/x.py", "from quire.cli.app import app"),
        ("models/x.py", "from quire import LLM"),
        ("config/x.py", "from quire.types import KVSpec"),
        ("demo/x.py", "from quire.errors import QuireError"),
    ],
)
def test_the_walk_sees_an_upward_import(file: str, source: str) -> None:
    path = PACKAGE / file
    assert any(breach(path, other) for other in imports(path, source))


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, the last of them the first again; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_files_import_each_other() -> None:
    """Nor in a longer circle, nor in functions or under TYPE_CHECKING."""
    graph = {module: set(imports(path)) - {module} for module, path in modules().items()}
    assert " <- ".join(circle(graph)) == ""


def test_the_walk_sees_a_circle() -> None:
    sources = {
        "platform/kv/x.py": "from quire.platform.kv import y",
        "platform/kv/y.py": "def f():\n    from .z import Z",
        "platform/kv/z.py": "if TYPE_CHECKING:\n    import quire.platform.kv.x",
    }
    modules().update({module_of(PACKAGE / file): PACKAGE / file for file in sources})
    try:
        graph = {module_of(PACKAGE / file): set(imports(PACKAGE / file, text)) for file, text in sources.items()}
    finally:
        modules.cache_clear()
    assert len(circle(graph)) == 4
    graph["quire.platform.kv.y"].clear()
    assert not circle(graph)


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
    """limit: of the processor's time, which other programs beside it do not lengthen much."""
    code = (
        "import json, sys, time; begin = time.process_time()\n"
        f"import {module}; seconds = time.process_time() - begin\n"
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


def test_what_the_architecture_names_is_there() -> None:
    """Every file and folder in docs/architecture.md, by the end of its path."""
    root = DOCUMENT.parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False).stdout.split()
    files = listed or [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    paths = {f"/{path}" for path in files} | {f"/{folder}/" for path in files for folder in Path(path).parents}
    text = DOCUMENT.read_text()
    named = re.findall(r"`([\w/]+(?:\.py|\.h|/))`", text) + re.findall(r"^ *([\w/]+(?:\.py|/)) ", text, re.M)
    assert len(named) > 100
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []
