"""What the tests of this folder share."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from quire.demo import picture_path

PATH = "/v1/chat/completions"
MODEL = "quire-demo"
SEEN = "There is a red circle, a blue star and a yellow triangle."
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 24}
STORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "There is a green star and a black triangle. What color is the star?"},
    {"role": "assistant", "content": "Green."},
    {"role": "user", "content": "And the triangle?"},
]
WHO = [{"role": "user", "content": "Who are you?"}]
TOLD = [{"role": "user", "content": "There is a red star and a blue circle. Tell me a story."}]
Messages = list[dict[str, Any]]


def data_url(path: Path, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def seen(*parts: str | Path, **image: Any) -> Messages:
    """A message of texts and pictures."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Path):
            content.append({"type": "image_url", "image_url": {"url": data_url(part), **image}})
        else:
            content.append({"type": "text", "text": part})
    return [{"role": "user", "content": content}]


LOOK = seen(picture_path(), "What do you see?")
KEYS = {f"k{number}": 1 for number in range(50_000)}
