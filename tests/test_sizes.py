"""How long files, functions and classes may be: of the package, the tests, the benchmarks and the scripts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("quire", "tests", "benchmarks", "scripts")
FILE_LINES, FUNCTION_LINES, PUBLIC_METHODS = 400, 60, 20
# What is larger, and says why where it stands.
EXCUSED = {"quire/lora/registry.py: AdapterRegistry"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large(name: str, source: str) -> Iterator[tuple[str, str]]:
    """(what it is, how large) of each thing in a file that is larger than it may be. name: the file's."""
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield name, f"{lines} lines, and a file may have {FILE_LINES}"
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{name}: {node.name}", f"{lines} lines, and a function may have {FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, Function) and not one.name.startswith("_")}
            if len(methods) > PUBLIC_METHODS:
                yield f"{name}: {node.name}", f"{len(methods)} public methods, and a class may have {PUBLIC_METHODS}"


def test_files_functions_and_classes_are_not_too_large() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    found = dict(one for path in files for one in too_large(path.relative_to(ROOT).as_posix(), path.read_text()))
    more = [f"{name}: {why}" for name, why in found.items() if name not in EXCUSED]
    assert not more, "\n".join(["make two of it, or excuse it here and say why where it stands:", *more])
    assert set(found) == EXCUSED, "an excuse that is not needed any more"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = 1\n" * 401, "a.py"),
        ("async def f():\n" + "    x = 1\n" * 60, "a.py: f"),
        ("class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(21)), "a.py: C"),
        ("def f():\n    class C:\n" + "".join(f"        def m{i}(self): ...\n" for i in range(21)), "a.py: C"),
    ],
)
def test_what_is_too_large_is_found(source: str, name: str) -> None:
    assert [what for what, _ in too_large("a.py", source)] == [name]


def test_what_is_just_within_is_not() -> None:
    methods = "".join(f"    def m{i}(self): ...\n    def _m{i}(self): ...\n" for i in range(20))
    source = f"class C:\n{methods}def f():\n" + "    x = 1\n" * 59
    assert not list(too_large("a.py", source + "x = 1\n" * (400 - len(source.splitlines()))))
