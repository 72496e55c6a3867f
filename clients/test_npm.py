"""npm's `openai` and `ai`: each script of npm/ makes its checks one by one, by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import LOOK, LOUD, MODEL, QUESTION, TOO_LONG

CHECKS = {
    "openai": (
        "text", "streams", "images", "logprobs", "stop and seed", "adapters", "fields that change no answer",
        "a context that is too long", "refused tools", "refused structured output",
    ),
    "ai": ("text", "streams", "images", "adapters", "completions", "refused tools", "refused objects"),
}  # fmt: skip


@pytest.mark.parametrize(("package", "check"), [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_of(package: str, check: str, url: str, picture_url: str) -> None:
    told = dict(url=url, model=MODEL, loud=LOUD, question=QUESTION, look=LOOK, long=TOO_LONG, picture=picture_url)
    script = Path(os.environ["QUIRE_CLIENTS"]) / "npm" / f"{package}.mjs"
    command = ["node", str(script), check]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
