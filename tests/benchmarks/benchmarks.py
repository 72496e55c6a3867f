"""The modules of benchmarks/, imported without leaving their names where packages' would be looked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
_MAIN = 'if __name__ == "__main__":'
# throughput.py is `quire bench`, and runs when it is imported.
BENCHMARKS = sorted(p.stem for p in FOLDER.glob("*.py") if _MAIN in p.read_text() or p.stem == "throughput")


class _Parsed(Exception):
    """Instead of what a benchmark would do with its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A benchmark's module; it and its neighbours are forgotten afterwards."""
    before = dict(sys.modules)
    own = {path.stem for path in FOLDER.iterdir()}
    hidden = {module: sys.modules.pop(module) for module in own & set(sys.modules)}
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for module in set(sys.modules) - set(before):
            if module.partition(".")[0] in own:
                del sys.modules[module]
        sys.modules.update(hidden)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a benchmark's `main` makes."""

    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Parsed(self)

    with imported(name) as module, mock.patch.object(sys, "argv", [f"{name}.py"]):
        try:
            with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
                module.main()
        except _Parsed as parsed:
            return parsed.parser
    raise AssertionError(f"benchmarks/{name}.py parses nothing")
