"""Videos that come again by their uuid, beside images, within the limits of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import RequestError
from tests.multimodal.open_engine import ask, open_llm, tokens
from tests.multimodal.test_videos import ROWS, VIDEO, made
from tests.multimodal.tiny_vision import IMAGE, picture

A = picture(1, (28, 28))
CLIP = np.random.default_rng(1).integers(0, 255, (4, 28, 28, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_llm(made(*ROWS[0], tmp_path_factory.mktemp("qwen")), limit_mm_per_prompt={"image": 2, "video": 1})


def both(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [5, IMAGE, 6, VIDEO, 7], "multi_modal_data": data, **more}


def test_a_video_and_an_image_by_their_uuids(llm: Any) -> None:
    expected = tokens(llm, both({"image": A, "video": CLIP}))
    names = {"multi_modal_uuids": {"image": ["i"], "video": "v"}}
    assert tokens(llm, both({"image": A, "video": CLIP}, **names)) == expected
    assert tokens(llm, both({"image": None, "video": [None]}, **names)) == expected
    assert tokens(llm, both({}, multi_modal_uuids={"image": "i", "video": ["v"]})) == expected
    with pytest.raises(RequestError, match="video 0: nothing is known of the uuid 'i'"):
        ask(llm, both({"image": A}, multi_modal_uuids={"video": ["i"]}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image": [A] * 3}, r"has 3 images, and 2 are allowed: .* limit_mm_per_prompt"),
        ({"video": [CLIP] * 2}, r"has 2 of video, and 1 are allowed: .* limit_mm_per_prompt"),
        ({"audio": [CLIP]}, r"has 'audio', and this model takes image, video"),
        ({"image": A, "smell": [CLIP]}, "smell"),
    ],
    ids=["images", "videos", "audio", "unknown"],
)
def test_limits_name_kind_and_way_out(llm: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ask(llm, both(data))
