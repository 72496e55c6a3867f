"""/v1/embeddings of CLIP: a text, or an image in a message, each with the vector that it has without a server."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM
from tests.models.pooling.worlds_of_towers import saved_with_all
from tests.multimodal.tiny_vision import picture
from tests.server.api_answers import post, refusal
from tests.server.api_server import LocalServer
from tests.server.pooling.helpers import EMBEDDINGS, POOLING, SCORE, engine, vector


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    saved_with_all("CLIP", "odd", folder)
    return folder


@pytest.fixture(scope="module")
def http(model: Path) -> Iterator[Any]:
    with LocalServer(engine(model=str(model))) as server, server.http() as client:
        yield client


def part(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_texts_and_images(http: Any, model: Path) -> None:
    llm = LLM(str(model), num_gpu_blocks_override=96)
    image = picture(3, (40, 31))
    given: list[Any] = ["the red circle", "blue", {"prompt": "", "multi_modal_data": {"image": image}}]
    expected = [one.outputs.data.numpy() for one in llm.encode(given, use_tqdm=False)]
    found = post(http, EMBEDDINGS, input=given[:2])["data"]
    found += post(http, EMBEDDINGS, messages=asked(part(image)))["data"]
    assert all(np.array_equal(vector(one["embedding"]), row) for one, row in zip(found, expected, strict=True))
    words = [{"type": "text", "text": "the red circle"}], "the red circle"
    for content in words:
        said = post(http, EMBEDDINGS, messages=[{"role": "user", "content": content}])
        assert said["data"] == [{**found[0], "index": 0}]
    assert post(http, POOLING, messages=asked(part(image)))["data"][0]["data"] == found[2]["embedding"]
    (score,) = post(http, SCORE, text_1="blue", text_2=["the red circle"])["data"]
    assert abs(score["score"] - float(expected[0] @ expected[1])) < 1e-6


def test_messages_that_are_no_good(http: Any) -> None:
    image, text = part(picture(3, (40, 31))), {"type": "text", "text": "red"}
    for messages, why in (
        (asked(image, text), "an image and a text"),
        (asked(image, image), "2 images"),
        ([*asked(image), *asked(text)], "one message, not 2"),
        (asked(), "is empty"),
        (asked(part(picture(3, (40, 31))) | {"type": "video_url", "video_url": "data:,"}), "messages"),
    ):
        assert why in refusal(http, EMBEDDINGS, messages=messages)["message"]
    told = refusal(http, EMBEDDINGS, messages=asked(image), chat_template_kwargs={"a": 1})
    assert "no chat template" in told["message"] and told["param"] == "chat_template_kwargs"
    assert "dimensions" in refusal(http, EMBEDDINGS, input="red", dimensions=8)["message"]
    assert (
        "truncate_prompt_tokens"
        in refusal(http, EMBEDDINGS, messages=asked(image), truncate_prompt_tokens=3)["message"]
    )
    assert "image 0" in refusal(http, EMBEDDINGS, messages=asked({**image, "image_url": "data:,aa"}))["message"]
    assert "task" in refusal(http, POOLING, input="red", task="token_embed")["message"]
