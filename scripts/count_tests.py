"""How much the tests check: functions, assertions written in them, and cases once parameters are filled in.

    python scripts/count_tests.py [folder of a checkout]

Run it before and after a change that moves tests: none of the numbers should fall without a reason that has a name.
An assertion is an `assert`, a block under `pytest.raises` or `pytest.warns`, or a call of an `assert_...` function.
Cases are what pytest collects in the checkout, whatever its markers leave out by default.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

_BLOCKS = {"raises", "warns", "deprecated_call"}


def count(tree: ast.Module) -> Counter[str]:
    """What one file of tests holds."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found["assertions"] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found["functions"] += node.name.startswith("test_")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found["assertions"] += name in _BLOCKS or name.startswith("assert_")
    return found


def cases(root: Path) -> int:
    """The cases that pytest collects in a checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-o", "addopts=", "tests"]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    lines = [line for line in done.stdout.splitlines() if ".py: " in line]
    return sum(int(line.rpartition(": ")[2]) for line in lines)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    total: Counter[str] = Counter()
    for path in sorted((root / "tests").rglob("*.py")):
        total += count(ast.parse(path.read_text(encoding="utf-8")))
        total["files"] += 1
    total["cases"] = cases(root)
    for name in ("files", "functions", "assertions", "cases"):
        print(f"{name:>10} {total[name]:>7,}")


if __name__ == "__main__":
    main()
