"""What the tests of all clients share: where the server is, and what the bundled model is asked. Run by run.py."""

import base64
import json
import os
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

DEMO = Path(__file__).resolve().parent.parent / "quire" / "demo"

MODEL = "quire-demo"
QUESTION = "There is a red star and a blue circle. What color is the star?"  # "Red."
LOOK = "What do you see?"  # "There is a red circle, ...": the picture's
TOO_LONG = "A red star. " * 2000  # tokens by the thousand; the model takes 1,024 or so
LOUD = "shout"  # an adapter that SHOUTS

SCENE = "There is a red star and a blue circle. Which shapes are there?"  # as JSON: SHAPES
DRAW = "Draw a red star."  # a call of draw
COUNT = "There is a red star and a blue circle. How many circles are there?"  # a call of count, where there is one
CIRCLES = "There is a red star, a blue circle and a green circle. How many circles are there?"


class Shape(BaseModel):
    """A shape."""

    shape: Literal["circle", "square", "triangle", "star"]
    color: Literal["red", "green", "blue", "yellow", "purple", "orange", "black", "gray"]


class Scene(BaseModel):
    """All shapes that are there."""

    shapes: list[Shape]


SHAPES = Scene.model_validate({"shapes": [{"shape": "star", "color": "red"}, {"shape": "circle", "color": "blue"}]})
STAR = {"shape": "star", "color": "red"}  # the arguments that DRAW asks for


def draw(shape: Literal["circle", "square", "triangle", "star"], color: str) -> str:
    """Draw a shape.

    Args:
        shape: Which shape.
        color: In which color.
    """
    return "done"


def count(kind: Literal["circle", "square", "triangle", "star"]) -> str:
    """Count the shapes of a kind.

    Args:
        kind: Which shapes.
    """
    return "2"


# The clients must need no key of anybody's, and must not be led elsewhere by the variables of whoever runs this.
MAKERS = ("ANTHROPIC_", "COHERE_", "CO_API_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "OPENAI_")
for name in [name for name in os.environ if name.startswith(MAKERS)]:
    del os.environ[name]


@pytest.fixture(scope="session")
def server() -> str:
    """http://host:port"""
    return os.environ["QUIRE_URL"]


@pytest.fixture(scope="session")
def embedder() -> str:
    """http://host:port of a server that embeds."""
    return os.environ["QUIRE_EMBEDDER_URL"]


@pytest.fixture(scope="session")
def url(server: str) -> str:
    """What clients call their base URL."""
    return f"{server}/v1"


@pytest.fixture(scope="session")
def picture() -> Path:
    return DEMO / "picture.png"


@pytest.fixture(scope="session")
def picture_url(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


@pytest.fixture(scope="session")
def picture_parts(picture_url: str) -> list[dict]:
    """A message's content in OpenAI's form."""
    return [{"type": "image_url", "image_url": {"url": picture_url}}, {"type": "text", "text": LOOK}]


@pytest.fixture(scope="session")
def tokenizer() -> Path:
    """The folder of the bundled model's tokenizer."""
    return DEMO / "model"


@pytest.fixture(scope="session")
def adapter() -> Path:
    """The folder of an adapter that may be loaded by another name."""
    return DEMO / "adapters" / LOUD


KINDS = {"type": "string", "enum": ["circle", "square", "triangle", "star"]}
DRAW_FIELDS = {
    "type": "object",
    "properties": {"shape": KINDS, "color": {"type": "string"}},
    "required": ["shape", "color"],
    "additionalProperties": False,
}
COUNT_FIELDS = {"type": "object", "properties": {"kind": KINDS}, "required": ["kind"], "additionalProperties": False}
FUNCTIONS = [
    {"name": "draw", "description": "Draw a shape.", "parameters": DRAW_FIELDS},
    {"name": "count", "description": "Count the shapes of a kind.", "parameters": COUNT_FIELDS},
]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]


def check_scene(found: BaseModel | dict | str) -> None:
    """It is what SCENE asks for, by its schema. Some clients make models of their own of Scene."""
    if isinstance(found, BaseModel):
        found = found.model_dump()
    assert (Scene.model_validate_json(found) if isinstance(found, str) else Scene.model_validate(found)) == SHAPES


def check_star(arguments: dict | str) -> None:
    """They are what DRAW asks for."""
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == STAR
