"""Placeholders that are not one token repeated, of which some take no feature: a plug-in's model, against plain LLaVA.

`FramedLlava` sets an image between two tokens and ends each row of its features with a third. Plain LLaVA, asked with
those tokens in the prompt and each row of features as an image of its own, must give the same tokens.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from quire import registry
from quire.errors import RequestError
from quire.models.llava import LlavaForConditionalGeneration
from quire.multimodal.preprocessor import ProcessedImage
from quire.multimodal.prompt import expand
from quire.registry.row import IMAGES
from quire.types import ImageLayout, MediaLayout, PlaceholderRange
from tests.multimodal.open_engine import ask, error_of, nothing_left, one, open_llm, prompt, tokens
from tests.multimodal.tiny_vision import IMAGE, image_processor, picture

BEGIN, ROW, END = 11, 12, 13
SIDE = 3  # features in a row, and rows
FRAME = (BEGIN, *(*(IMAGE,) * SIDE, ROW) * SIDE, END)
NAME = "FramedLlavaForConditionalGeneration"
SIZES = [(30, 100), (24, 24), (9, 17)]


class FramedLlava(LlavaForConditionalGeneration):
    def image_layout(self, inputs):
        assert super().image_layout(inputs).tokens == SIDE**2
        return self._framed()

    def planned_layout(self, size, final):
        return self._framed()

    def _framed(self):
        return ImageLayout(len(FRAME), ids=FRAME, mask=tuple(token == IMAGE for token in FRAME))


@pytest.fixture(scope="module")
def framed(llava_module, tmp_path_factory):
    """The same checkpoint under the plug-in's architecture."""
    folder = tmp_path_factory.mktemp("framed") / "model"
    shutil.copytree(llava_module, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
    with pytest.MonkeyPatch.context() as patch:
        row = registry.Row(NAME, f"{__name__}:FramedLlava", IMAGES, package="tests")
        patch.setattr(registry, "plugin_rows", lambda: (row,))
        yield str(folder)


@pytest.fixture(scope="module")
def llava_module(paths):
    return paths["llava"]


@pytest.fixture(scope="module")
def plain(llava_module):
    return open_llm(str(llava_module), limit_mm_per_prompt={"image": 99})


def features(llm, image):
    model = llm.llm_engine.executor.runner.model
    with torch.inference_mode():
        return model.encode(image_processor("LlavaForConditionalGeneration", "clip")(image, return_tensors="pt"))


def as_rows(llm, ids, images):
    """The prompt for plain LLaVA: an image is its frame, in which each row is an image."""
    found, rows, pending = [], [], list(images)
    for token in ids:
        if token == IMAGE:
            rows += [{"image_embeds": row} for row in features(llm, pending.pop(0)).split(SIDE)]
        found += (BEGIN, *(IMAGE, ROW) * SIDE, END) if token == IMAGE else (token,)
    return prompt(found, rows)


def given():
    images = [picture(number, size) for number, size in enumerate(SIZES)]
    return [([5, 6, IMAGE, 7, 8], images[:1]), ([IMAGE, IMAGE, 9], images[1:]), ([5, IMAGE, 7, IMAGE], images[:2])]


@pytest.mark.parametrize("budget", [5, 7, 2048])
def test_a_frame_of_other_tokens(framed, plain, budget):
    llm = open_llm(framed, max_num_batched_tokens=budget, block_size=4)
    expected = [tokens(plain, as_rows(plain, ids, images))[0] for ids, images in given()]
    assert tokens(llm, *(prompt(ids, images) for ids, images in given())) == expected
    assert len({tuple(answer) for answer in expected}) == 3
    placed = [
        prompt([token for one in ids for token in (FRAME if one == IMAGE else (one,))], images)
        for ids, images in given()
    ]
    outputs = ask(llm, placed)
    assert [output.prompt_token_ids for output in outputs] == [one["prompt_token_ids"] for one in placed]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    nothing_left(llm)


def test_room_is_for_features_and_not_for_placeholders(framed):
    llm = open_llm(framed, features=SIDE**2)
    assert tokens(llm, one(picture(0, SIZES[0])))
    nothing_left(llm)


def test_a_frame_that_is_torn_apart(framed):
    llm = open_llm(framed)
    torn = [5, *FRAME[:4], 6, *FRAME[5:]]
    assert "9 image markers and 1 image" in error_of(ask(llm, prompt(torn, [picture(0, SIZES[0])]))[0])


def framed_image(ids, marker):
    layout = ImageLayout(len(ids), ids=tuple(ids), mask=tuple(token == marker for token in ids))
    return ProcessedImage(b"x", layout, None, None)


@pytest.mark.parametrize(
    ("ids", "starts"),
    [([1, 9, 2], [1]), ([9, 9], [0, 4]), ([1, 9, 9, 9, 2], [1, 5, 9])],
)
def test_where_frames_lie(ids, starts):
    image = framed_image([7, 9, 9, 8], 9)
    expanded, placed = expand(ids, [image] * len(starts), {"image": 9})
    items = [item for _, item in placed]
    assert [item.offset for item in items] == starts and len(expanded) == len(ids) + 3 * len(starts)
    assert all(tuple(expanded[item.offset : item.end]) == image.layout.ids for item in items)
    assert expand(expanded, [image] * len(starts), {"image": 9}) == (expanded, placed)


def test_several_kinds_in_one_prompt():
    """Those of one kind in their order, whatever order the kinds were given in."""
    markers = {"image": 9, "video": 19}
    video = ProcessedImage(b"v", MediaLayout(5, ids=(8, 19, 19, 8, 19), sees=((1, 3),)), None, None, "video")
    first, second = (
        ProcessedImage(digest, MediaLayout(tokens), None, None) for digest, tokens in ((b"a", 2), (b"b", 1))
    )
    expanded, placed = expand([1, 9, 19, 9, 2], [video, first, second], markers)
    assert expanded == [1, 9, 9, 8, 19, 19, 8, 19, 9, 2]
    assert [one for one, _ in placed] == [first, video, second]
    assert [(item.kind, item.offset, item.end) for _, item in placed] == [
        ("image", 1, 3), ("video", 3, 8), ("image", 8, 9),
    ]  # fmt: skip
    assert placed[1][1].spans == ((4, 6),)
    assert expand(expanded, [first, second, video], markers) == (expanded, placed)
    with pytest.raises(RequestError, match="1 video marker and 2 videos: there must be one marker for each video"):
        expand([1, 19], [video, video], markers)


@pytest.mark.parametrize("sees", [((0, 4),), ((2, 1),), ((1, 3), (2, 3)), ((-1, 1),)])
def test_ranges_that_are_none(sees):
    with pytest.raises(ValueError, match="sees="):
        MediaLayout(3, sees=sees)


def test_which_positions_take_which_features():
    item = PlaceholderRange(b"x", 10, 6, None, (False, True, True, False, True, False))
    assert item.features == 3 and PlaceholderRange(b"x", 10, 6).features == 6
    assert item.features_between(10, 16) == ([11, 12, 14], 0, 3)
    assert item.features_between(12, 15) == ([12, 14], 1, 3)
    assert item.features_between(15, 16) == ([], 3, 3)
    plain = PlaceholderRange(b"x", 10, 6)
    positions, first, end = plain.features_between(12, 15)
    assert list(positions) == [12, 13, 14] and (first, end) == (2, 5)


@pytest.mark.parametrize("more", [{"ids": (1, 2)}, {"mask": (True, True)}])
def test_a_layout_of_another_length(more):
    with pytest.raises(ValueError, match=r"2 (ids|mask) for 3 placeholders"):
        ImageLayout(3, **more)
