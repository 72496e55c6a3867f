"""What an image will become is known before any work is done on it, for each processor that is served."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal import ImageProcessor, load_picture
from quire.multimodal import preprocessor as prepare
from tests.multimodal.open_engine import ask, error_of, nothing_left, one, open_llm, tokens
from tests.multimodal.tiny_vision import SIDE, build, picture

SIZES = [(24, 24), (30, 100), (100, 30), (53, 47), (1, 1), (1, 70), (700, 9), (8, 8), (640, 480), (25, 23)]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "llava": [
        {}, {"size": 40}, {"size": {"height": 30, "width": 50}}, {"do_resize": False},
        {"size": {"height": SIDE, "width": SIDE}, "do_center_crop": False}, {"do_center_crop": False},
        {"crop_size": 20}, {"crop_size": {"height": 24, "width": 25}},
    ],
    "next": [
        {}, {"size": 40}, {"size": {"height": 30, "width": 50}}, {"do_pad": False}, {"crop_size": 20},
        {"size": {"height": SIDE, "width": SIDE}, "do_center_crop": False}, {"crop_size": {"height": 24, "width": 25}},
    ],
    "qwen": [
        {}, {"size": {"shortest_edge": 64, "longest_edge": 512}}, {"max_pixels": 300}, {"min_pixels": 1500},
        {"do_resize": False}, {"size": {"height": 8, "width": 8}}, {"min_pixels": 1000, "max_pixels": 100},
        {"size": {"shortest_edge": 1, "longest_edge": 1}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(path):
    return open_llm(path)


@pytest.fixture
def never(llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be decoded or processed."""

    def work(*_: Any) -> Any:
        raise AssertionError("work was done")

    monkeypatch.setattr(prepare, "decode", work)
    monkeypatch.setattr(type(llm.llm_engine.media.preprocessor.processor), "__call__", work)


@pytest.mark.filterwarnings("ignore")
def test_plans_come_true(llm, kind):
    compare(llm, SETTINGS[kind.name])


@pytest.mark.filterwarnings("ignore")
def test_plans_of_siglip_come_true(tmp_path):
    compare(open_llm(str(build("LlavaForConditionalGeneration", "siglip", tmp_path))), [{}, {"size": 30}])


def compare(llm: Any, settings: list[dict[str, Any]]) -> None:
    processor, model = llm.llm_engine.media.preprocessor.processor, llm.llm_engine.executor.runner.model
    config = llm.llm_engine.config.media
    seen = set()
    for number, (width, height) in enumerate(SIZES):
        shown = load_picture(picture(number, (width, height)), config)
        for given in settings:
            checked = processor.settings(given)
            try:
                planned: Any = model.planned_layout((height, width), processor.plan(height, width, checked).final)
            except ValueError as error:
                planned = type(error)
            try:
                made: Any = model.image_layout(processor(shown, checked))
            except ValueError as error:
                made = type(error)
            seen.add(isinstance(made, type))
            if isinstance(planned, type):  # which a processor may find only by failing
                assert isinstance(made, type), (width, height, given)
            else:
                assert planned == made or isinstance(made, type), (width, height, given)
    assert seen == {True, False}


def test_a_processor_that_pads_to_a_square(tmp_path):
    """LLaVA's own: a strip that would become a square of 22 gigapixels is refused."""
    edge = {"height": SIDE, "width": SIDE}
    written: dict[str, Any] = {"image_processor_type": "LlavaImageProcessor", "do_pad": False, "do_center_crop": True}
    written |= {"size": {"shortest_edge": SIDE}, "crop_size": edge}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    processor = ImageProcessor(tmp_path, MediaConfig())
    for number, (width, height) in enumerate(SIZES):
        shown = load_picture(picture(number, (width, height)), MediaConfig())
        for given in ({}, {"do_pad": True}, {"do_pad": True, "do_center_crop": False}):
            settings = processor.settings(given)
            made = processor(shown, settings)["pixel_values"].shape[-2:]
            assert processor.plan(height, width, settings).final == tuple(made)
    padded = processor.settings({"do_pad": True})
    assert processor.plan(7071, 100, padded).pixels == 7071**2
    for size in ((150_000, 330), (330, 150_000), (7072, 1)):
        with pytest.raises(RequestError, match="pixels on the way, and 50,000,000 are allowed"):
            processor.plan(*size, padded)


TOO_LARGE: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llava": [
        ({"size": {"height": 7071, "width": 7071}, "do_center_crop": False}, r"makes \[3, 7071, 7071\] of it"),
        ({"crop_size": {"height": 7071, "width": 7071}}, r"makes \[3, 7071, 7071\] of it"),
        ({"size": 5000}, "are allowed"),  # times the picture's stretch
    ],
    "next": [
        ({"size": {"height": 7071, "width": 7071}}, "pixels on the way, and 50,000,000 are allowed"),
        ({"crop_size": 1, "do_center_crop": False}, r"make \(24, 24\) of tiles of \(1, 1\)"),
        ({"crop_size": {"height": 7071, "width": 7071}}, "pixels on the way, and 50,000,000 are allowed"),
    ],
    "qwen": [
        ({"min_pixels": 49_000_000, "max_pixels": 50_000_000}, "max_model_len leaves room for"),
        ({"size": {"shortest_edge": 50_000_000, "longest_edge": 50_000_000}}, "max_model_len leaves room for|allowed"),
    ],
}  # fmt: skip


def test_what_would_become_too_large_is_refused_before_any_work(llm, kind, never):
    for settings, reason in TOO_LARGE[kind.name]:
        (output,) = ask(llm, one(picture(1, (40, 160)), mm_processor_kwargs=settings))
        message = error_of(output)
        assert "image 0: " in message and re.search(reason, message)
    nothing_left(llm)


def test_the_engines_own_settings_are_held_to_it_too(path, kind):
    settings, reason = TOO_LARGE[kind.name][0]
    llm = open_llm(path, mm_processor_kwargs=settings)
    (output,) = ask(llm, one(picture(1, (40, 160))))
    assert re.search(reason, error_of(output))
    nothing_left(llm)


def test_ordinary_ones_are_answered_as_ever(llm):
    given = one(picture(1, (40, 160)))
    assert tokens(llm, given) == tokens(llm, given)
