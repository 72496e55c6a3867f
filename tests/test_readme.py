"""The README shows only what runs: its Python is that of examples/, its outputs are those of today's code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A ```python block, and the ``` block of what it prints.
SHOWN = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)


def shown() -> dict[str, tuple[str, str]]:
    files = {path.read_text(): path.name for path in (ROOT / "examples").glob("*.py")}
    blocks = SHOWN.findall((ROOT / "README.md").read_text())
    return {files[code]: (code, output) for code, output in blocks}


def test_every_example_is_shown():
    assert set(shown()) == {path.name for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "examples").glob("*.py"))])
def test_an_example_runs(name):
    """What is printed depends on the instruction set in its last bits, so only its form is compared."""
    result = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(shown()[name][1].splitlines())
    if name == "chat.py":
        assert result.stdout.splitlines()[0] == shown()[name][1].splitlines()[0]
