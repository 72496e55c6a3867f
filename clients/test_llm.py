"""The command `llm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRAW, LOOK, LOUD, MODEL, QUESTION, SCENE, Scene, check_scene

MODELS = """
- {{model_id: quire, model_name: {model}, api_base: "{url}", vision: true, supports_schema: true, supports_tools: true}}
- {{model_id: loud, model_name: {loud}, api_base: "{url}", vision: true}}
- {{model_id: plain, model_name: {model}, api_base: "{url}", completion: true}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, url: str) -> Path:
    """Where llm keeps what it knows."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, loud=LOUD, url=url))
    return folder


def run(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "llm", *map(str, args)]
    environment = {**os.environ, "LLM_USER_PATH": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


def llm(home: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return run(home, "prompt", "-m", *args)


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


def test_schemas(home: Path) -> None:
    """By response_format, streamed and not, and in llm's own short form."""
    for flags in (["--no-stream"], []):
        check_scene(
            said(
                home, "quire", SCENE, "--schema", json.dumps(Scene.model_json_schema()), "-o", "temperature", 0, *flags
            )
        )
        found = json.loads(
            said(home, "quire", SCENE, "--schema", "color str, shape str", "-o", "temperature", 0, *flags)
        )
        assert set(found) == {"color", "shape"}
    many = json.loads(said(home, "quire", SCENE, "--schema-multi", "color, shape", "-o", "temperature", 0))
    assert all(set(each) == {"color", "shape"} for each in many["items"])


FUNCTIONS = """
def draw(shape: str, color: str) -> str:
    "Draw a shape."
    return "done"
"""


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_tools(home: Path, flags: tuple[str, ...]) -> None:
    """The call is run, and its answer goes back to the model: `--td` shows it on standard error."""
    done = llm(home, "quire", DRAW, "--functions", FUNCTIONS, "--td", "-o", "temperature", 0, *flags)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "done" in done.stderr and "draw(" in done.stderr


def test_a_tool_by_its_name(home: Path) -> None:
    """-T, of those that llm itself brings. Whether it is of use here is the model's to say."""
    assert said(home, "quire", "What is your version?", "-T", "llm_version", "-o", "temperature", 0)


@pytest.mark.parametrize("flags", [(), ("--no-stream",), ("--responses",), ("--responses", "--no-stream")])
def test_an_endpoint(home: Path, url: str, flags: tuple[str, ...]) -> None:
    """`llm openai endpoint`: the server by its URL, without a file."""

    def ask(*more: object) -> str:
        done = run(home, "openai", "endpoint", url, "-m", MODEL, "-o", "temperature", 0, *flags, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert ask(QUESTION) == "Red."
    check_scene(ask(SCENE, "--schema", json.dumps(Scene.model_json_schema())))
    assert ask(DRAW, "--functions", FUNCTIONS)
    assert MODEL in run(home, "openai", "endpoint", url, "--models").stdout
