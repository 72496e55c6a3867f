"""What the tests of all clients share: where the server is, and what the bundled model is asked. Run by run.py."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parent.parent / "quire" / "demo"

MODEL = "quire-demo"
QUESTION = "There is a red star and a blue circle. What color is the star?"  # "Red."
LOOK = "What do you see?"  # "There is a red circle, ...": the picture's
TOO_LONG = "A red star. " * 2000  # tokens by the thousand; the model takes 1,024 or so
LOUD = "shout"  # an adapter that SHOUTS

# The clients must need no key of anybody's, and must not be led elsewhere by the variables of whoever runs this.
for name in [name for name in os.environ if name.startswith(("OPENAI_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_"))]:
    del os.environ[name]


@pytest.fixture(scope="session")
def server() -> str:
    """http://host:port"""
    return os.environ["QUIRE_URL"]


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
