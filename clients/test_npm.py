"""npm's `openai`, `ai` and `@anthropic-ai/sdk`: each script of npm/ makes its checks one by one, by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import DRAW, LOOK, LOUD, MODEL, QUESTION, SCENE, SHAPES, STAR, TOO_LONG

CHECKS = {
    "openai": (
        "text", "streams", "images", "logprobs", "stop and seed", "adapters", "fields that change no answer",
        "a context that is too long", "tools", "streamed tools", "runTools", "parse", "json object", "responses",
    ),
    "ai": (
        "text", "streams", "images", "adapters", "completions", "text by each API", "generateObject", "streamObject",
        "any JSON", "output objects", "tools", "tools in steps", "streamed tools in steps",
    ),
    "anthropic": ("text", "streams", "tools", "toolRunner", "parse", "count of tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("package", "check"), [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_of(package: str, check: str, url: str, server: str, picture_url: str) -> None:
    told = dict(
        url=url, server=server, model=MODEL, loud=LOUD, question=QUESTION, look=LOOK, long=TOO_LONG,
        picture=picture_url, scene=SCENE, draw=DRAW, shapes=SHAPES.model_dump(), star=STAR,
    )  # fmt: skip
    script = Path(os.environ["QUIRE_CLIENTS"]) / "npm" / f"{package}.mjs"
    command = ["node", str(script), check]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
