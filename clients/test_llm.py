"""The command `llm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LOOK, LOUD, MODEL, QUESTION

MODELS = """
- {{model_id: quire, model_name: {model}, api_base: "{url}", vision: true, supports_schema: true}}
- {{model_id: loud, model_name: {loud}, api_base: "{url}", vision: true}}
- {{model_id: plain, model_name: {model}, api_base: "{url}", completion: true}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, url: str) -> Path:
    """Where llm keeps what it knows."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, loud=LOUD, url=url))
    return folder


def llm(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "llm", "prompt", "-m", *map(str, args)]
    environment = {**os.environ, "LLM_USER_PATH": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


def said(home: Path, *args: object) -> str:
    done = llm(home, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_text(home: Path) -> None:
    assert said(home, "quire", QUESTION, "-o", "temperature", 0, "--no-stream") == "Red."


def test_streams(home: Path) -> None:
    assert said(home, "quire", QUESTION, "-o", "temperature", 0, "-o", "seed", 3) == "Red."


def test_a_conversation(home: Path) -> None:
    assert said(home, "quire", QUESTION, "-s", "Be brief.")
    assert said(home, "quire", "-c", QUESTION)


def test_completions(home: Path) -> None:
    assert said(home, "plain", "Once upon a time", "-o", "max_tokens", 9)


def test_images_and_an_adapter(home: Path, picture: Path) -> None:
    assert "red circle" in said(home, "quire", LOOK, "-a", picture)
    assert "RED CIRCLE" in said(home, "loud", LOOK, "-a", picture)


def test_refused_schema(home: Path) -> None:
    done = llm(home, "quire", QUESTION, "--schema", "color str, shape str")
    assert done.returncode == 1 and "response_format" in done.stderr and "structured output" in done.stderr
