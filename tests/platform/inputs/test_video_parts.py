"""Videos among the parts of messages: their forms, their places, and texts that look like their markers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import RequestError
from quire.platform.inputs.chat import render_chat
from tests.platform.inputs.test_chat_images import LLAVA, VICUNA_TEMPLATE, byte_level, encoded, named, user, words

VIDEO = "<video>"
URL = "https://a/b.mp4"
FRAMES = np.zeros((2, 4, 4, 3), np.uint8)


def tokenizer() -> Any:
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": [VIDEO, LLAVA]})
    return made


def render(*parts: Any, **options: Any) -> Any:
    options = {"image_marker": LLAVA, "other_markers": {"video": VIDEO}, "chat_template": VICUNA_TEMPLATE, **options}
    return render_chat(tokenizer(), [user(*parts)], **options)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "video_url", "video_url": {"url": URL}}, URL),
        ({"type": "video_url", "video_url": URL}, URL),
        ({"type": "video", "url": "file:///a.mp4"}, "file:///a.mp4"),
        ({"type": "video", "video": URL}, URL),
        ({"type": "video", "video": FRAMES}, FRAMES),
    ],
)
def test_every_form_of_video_part(part: dict[str, Any], source: Any) -> None:
    prompt = render(words("What is"), part, words("?"))
    assert list(prompt.multi_modal_data) == ["video"] and prompt.multi_modal_data["video"][0] is source
    ids = tokenizer().convert_tokens_to_ids
    assert prompt.token_ids.count(ids(VIDEO)) == 1 and prompt.token_ids.count(ids(LLAVA)) == 0


def test_images_and_videos_keep_their_order() -> None:
    parts = [{"type": "video_url", "video_url": f"https://a/{number}.mp4"} for number in range(2)]
    prompt = render(parts[0], named("https://a/b.png"), parts[1])
    assert prompt.multi_modal_data == {"video": ["https://a/0.mp4", "https://a/1.mp4"], "image": ["https://a/b.png"]}
    ids = tokenizer().convert_tokens_to_ids
    markers = [token for token in prompt.token_ids if token in (ids(VIDEO), ids(LLAVA))]
    assert markers == [ids(VIDEO), ids(LLAVA), ids(VIDEO)]


def test_typed_markers_stay_text() -> None:
    ids = tokenizer().convert_tokens_to_ids
    prompt = render(words(f"a {VIDEO} b {LLAVA} c {VIDEO}"), {"type": "video_url", "video_url": URL})
    assert prompt.token_ids.count(ids(VIDEO)) == 1 and prompt.token_ids.count(ids(LLAVA)) == 0
    assert prompt.text.count(VIDEO) == 3 and prompt.text.count(LLAVA) == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "video_url", "video_url": "/etc/passwd"}, "video_url must be a URL that begins with data:"),
        ({"type": "video_url", "video_url": {"url": 3}}, "video_url must be a URL"),
        ({"type": "video", "video": "clip.mp4"}, "video must be a URL"),
        ({"type": "video"}, "either a 'video' or a 'url'; it has neither"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "this model takes no audio"),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "this model takes no audio"),
    ],
)
def test_what_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(part)


def test_a_model_without_videos() -> None:
    with pytest.raises(RequestError, match="'video_url', and this model takes no video"):
        render({"type": "video_url", "video_url": URL}, other_markers={})


def test_texts_alone_are_as_before() -> None:
    assert render(words("Hi")).token_ids == render(words("Hi"), other_markers={}).token_ids
    assert encoded("Hi")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"video_url": {"url": URL, "fps": 2}}, r"content\[0\].video_url.fps is not taken .* mm_processor_kwargs"),
        ({"video_url": {"url": URL, "num_frames": 8}}, r"video_url.num_frames is not taken .* by mm_processor_kwargs"),
        ({"video_url": {"url": URL}, "fps": 2}, r"content\[0\].fps is not taken of a single part"),
        ({"type": "video", "video": URL, "fps": 1.0}, r"content\[0\].fps is not taken"),
        ({"type": "video", "url": URL, "video_start": 3}, r"video_start is not taken .* cut the file"),
        ({"video_url": {"url": URL, "uuid": "a"}}, r"has uuid besides: a uuid stands beside video_url"),
        ({"video_url": {"url": URL, "colour": 1, "b": 2}}, r"video_url takes 'url', and has b, colour besides"),
    ],
)
def test_what_a_part_says_of_its_frames_is_not_passed_over(part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render({"type": "video_url", **part})


def test_what_is_null_in_a_part_says_nothing() -> None:
    part = {"type": "video_url", "video_url": {"url": URL, "fps": None, "uuid": None}, "fps": None}
    assert render(part).multi_modal_data == {"video": [URL]}
