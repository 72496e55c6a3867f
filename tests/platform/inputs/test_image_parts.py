"""Parts of messages: every form of an image, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import RequestError
from quire.platform.inputs.chat import render_chat, render_text
from tests.platform.inputs.test_chat_images import (
    LLAVA,
    LLAVA_TEMPLATE,
    PICTURE,
    VICUNA_TEMPLATE,
    byte_level,
    encoded,
    named,
    user,
    words,
)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (named("https://a/b.png"), "https://a/b.png"),
        ({"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}}, "data:x"),
        ({"type": "image_url", "image_url": "file:///a.png"}, "file:///a.png"),
        ({"type": "input_image", "image_url": "https://a/b.png", "detail": "auto"}, "https://a/b.png"),
        ({"type": "image_pil", "image_pil": PICTURE}, PICTURE),
        ({"type": "image", "image": PICTURE}, PICTURE),
        ({"type": "image", "image": "https://a/b.png"}, "https://a/b.png"),
        ({"type": "image", "image": b"GIF89a"}, b"GIF89a"),
        ({"type": "image", "url": "https://a/b.png", "path": None}, "https://a/b.png"),
    ],
)
@pytest.mark.parametrize("text_type", ["text", "input_text"])
def test_every_form_of_image_part(part: dict[str, Any], source: Any, text_type: str) -> None:
    message = user({"type": text_type, "text": "What is"}, part, words("?"))
    prompt = render_chat(byte_level(), [message], image_marker=LLAVA, chat_template=VICUNA_TEMPLATE)
    assert prompt.images == [source]
    assert prompt.token_ids == encoded("<s>USER: What is\n<image>\n? ASSISTANT:")


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": array}, array)
        for array in (np.zeros((2, 2, 3), np.uint8), memoryview(b"GIF89a"), bytearray(b"GIF89a"))
    ],
)
def test_sources_pass_untouched(part: dict[str, Any], source: Any) -> None:
    (found,) = render_chat(byte_level(), [user(part)], image_marker=LLAVA, chat_template=VICUNA_TEMPLATE).images
    assert found is source


def test_embeddings_pass_under_their_name() -> None:
    embeds = torch.zeros(3, 8)
    message = user({"type": "image_embeds", "image_embeds": embeds})
    (found,) = render_chat(byte_level(), [message], image_marker=LLAVA, chat_template=VICUNA_TEMPLATE).images
    assert list(found) == ["image_embeds"] and found["image_embeds"] is embeds


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url"}, r"\.image_url must be a URL"),
        ({"type": "image_url", "image_url": None}, r"\.image_url must be a URL"),
        ({"type": "image_url", "image_url": {"url": None}}, r"\.image_url must be a URL"),
        ({"type": "image_url", "image_url": {"url": 3}}, r"\.image_url must be a URL"),
        ({"type": "image_url", "image_url": ["https://a"]}, r"\.image_url must be a URL"),
        ({"type": "input_image", "file_id": "file-1"}, r"\.image_url must be a URL"),
        ({"type": "image_pil", "image_pil": None}, r"\.image_pil must be a PIL image, not NoneType"),
        ({"type": "image_pil", "image_pil": "https://a"}, r"\.image_pil must be a PIL image, not str"),
        ({"type": "image"}, "must have either an 'image' or a 'url'; it has neither"),
        ({"type": "image", "image": None}, "it has neither"),
        ({"type": "image", "image": PICTURE, "url": "https://a"}, "it has image and url"),
        ({"type": "image", "image": 3}, r"\.image must be a PIL image, a numpy array, bytes or a URL, not int"),
        ({"type": "image", "image": torch.zeros(3, 2, 2)}, r"\.image must be .* not Tensor"),
        ({"type": "image", "url": b"https://a"}, r"\.url must be a URL as a string, not bytes"),
        ({"type": "image", "path": "/a.png"}, r"\.path is not read: give a file: URL .* or the opened PIL image"),
        ({"type": "image", "base64": "aaaa"}, "data:image/png;base64"),
        ({"type": "image_embeds", "image_embeds": None}, r"\.image_embeds must be a tensor, not NoneType"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, r"\.image_embeds must be a tensor, not str"),
        ({"type": "audio_url", "audio_url": {"url": "x"}}, "is of type 'audio_url', and this model takes no audio"),
        ({"type": "input_audio", "input_audio": {}}, "is of type 'input_audio'"),
        ({"type": "video", "video": "x"}, "is of type 'video'"),
        ({"type": "x" * 100}, f"is of type '{'x' * 40}';"),
        ({"type": "input_text"}, r"\.text must be a string"),
        ("https://a", "must be an object with a 'type'"),
    ],
)
def test_parts_that_are_refused(part: Any, told: str) -> None:
    messages = [user(words("a")), user(words("b"), part)]
    with pytest.raises(RequestError, match=r"^messages\[1\]\.content\[1\].*" + told):
        render_chat(byte_level(), messages, image_marker=LLAVA, chat_template=VICUNA_TEMPLATE)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "image_pil", "image_embeds", "video_url"])
def test_a_text_model_refuses_every_part_that_is_no_text(kind: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[0\].content\[1\] is of type '{kind}', and .* text only"):
        render_chat(byte_level(), [user(words("a"), {"type": kind, kind: PICTURE})], chat_template=VICUNA_TEMPLATE)


def test_a_text_model_is_given_texts_and_its_special_tokens_are_as_ever() -> None:
    """A marker means nothing to it: what a user typed is encoded as transformers does."""
    messages = [user(words("a <image>"), words("b"))]
    prompt = render_chat(byte_level(), messages, chat_template=VICUNA_TEMPLATE)
    assert prompt.token_ids == encoded("<s>USER: a <image>\nb ASSISTANT:") and prompt.images == []
    # One that iterates over parts gets them: of a text it would write nothing.
    assert render_text(byte_level(), messages, chat_template=LLAVA_TEMPLATE) == "USER: a <image> b ASSISTANT:"
