"""Sounds among the parts of messages: their forms, their places, and texts that look like their markers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.errors import RequestError
from quire.platform.inputs.chat import render_chat
from tests.platform.inputs.test_chat_images import LLAVA, VICUNA_TEMPLATE, byte_level, named, user, words

AUDIO = "<|AUDIO|>"
URL = "https://a/b.wav"
SAMPLES = np.zeros(8, np.float32)
# As Qwen2-Audio's: parts are told by their keys and their type.
TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or content['type'] == 'audio' %}"
    "{% set count.value = count.value + 1 %}Audio {{ count.value }}: <|AUDIO|>\n"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)


def tokenizer() -> Any:
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": [AUDIO, LLAVA]})
    return made


def render(*parts: Any, **options: Any) -> Any:
    options = {"other_markers": {"audio": AUDIO}, "chat_template": TEMPLATE, **options}
    return render_chat(tokenizer(), [user(*parts)], **options)


@pytest.mark.parametrize("template", [TEMPLATE, VICUNA_TEMPLATE], ids=["parts", "text"])
@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "data:audio/wav;base64,AAAA"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}}, "data:audio/mp3;base64,AA=="),
        ({"type": "audio_url", "audio_url": {"url": URL}}, URL),
        ({"type": "audio_url", "audio_url": URL}, URL),
        ({"type": "audio", "url": "file:///a.wav"}, "file:///a.wav"),
        ({"type": "audio", "audio_url": URL}, URL),
        ({"type": "audio", "audio": URL}, URL),
        ({"type": "audio", "audio": SAMPLES}, SAMPLES),
        ({"type": "audio", "audio": (SAMPLES, 8000)}, (SAMPLES, 8000)),
    ],
)
def test_every_form_of_audio_part(part: dict[str, Any], source: Any, template: str) -> None:
    prompt = render(words("What is"), part, words("?"), chat_template=template)
    (given,) = prompt.multi_modal_data["audio"]
    assert list(prompt.multi_modal_data) == ["audio"] and (given is source or given == source)
    assert prompt.token_ids.count(tokenizer().convert_tokens_to_ids(AUDIO)) == 1


def test_images_and_sounds_keep_their_order() -> None:
    parts = [{"type": "audio_url", "audio_url": f"https://a/{number}.wav"} for number in range(2)]
    prompt = render(parts[0], named("https://a/b.png"), parts[1], image_marker=LLAVA, chat_template=VICUNA_TEMPLATE)
    assert prompt.multi_modal_data == {"audio": ["https://a/0.wav", "https://a/1.wav"], "image": ["https://a/b.png"]}
    ids = tokenizer().convert_tokens_to_ids
    markers = [token for token in prompt.token_ids if token in (ids(AUDIO), ids(LLAVA))]
    assert markers == [ids(AUDIO), ids(LLAVA), ids(AUDIO)]


def test_a_uuid_stands_for_what_came_before() -> None:
    whole = render({"type": "audio_url", "audio_url": {"url": URL}, "uuid": "a"})
    (first,) = whole.multi_modal_data["audio"]
    assert (first.uuid, first.source, first.kind) == ("a", URL, "audio")
    for part in ({"audio_url": None}, {"audio_url": {}}, {}):
        again = render({"type": "audio_url", "uuid": "a", **part})
        (second,) = again.multi_modal_data["audio"]
        assert (second.uuid, second.source, second.kind) == ("a", None, "audio")
        assert again.token_ids == whole.token_ids


def test_typed_markers_stay_text() -> None:
    prompt = render(words(f"a {AUDIO} b {AUDIO}"), {"type": "audio_url", "audio_url": URL})
    assert prompt.token_ids.count(tokenizer().convert_tokens_to_ids(AUDIO)) == 1
    assert prompt.text.count(AUDIO) == 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "audio_url", "audio_url": "/etc/passwd"}, "audio_url must be a URL that begins with data:"),
        ({"type": "audio_url", "audio_url": {"url": 3}}, "audio_url must be a URL"),
        ({"type": "audio", "audio": "clip.wav"}, "audio must be a URL"),
        ({"type": "audio", "audio_url": "clip.wav"}, "audio_url must be a URL"),
        ({"type": "audio"}, "either an 'audio' or a 'url'; it has neither"),
        ({"type": "audio", "audio": SAMPLES, "url": URL}, "it has audio and url"),
        ({"type": "input_audio"}, r"input_audio must be \{'data': base64"),
        ({"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}, "input_audio must be"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, r"input_audio\.format must be the file's"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "a;b,"}}, r"input_audio\.format"),
        ({"type": "video_url", "video_url": URL}, "'video_url', and this model takes no video"),
        ({"type": "image_url", "image_url": URL}, "'image_url', and this model takes no image"),
        ({"type": "audio_url", "audio_url": URL, "uuid": 3}, "its uuid must be a text"),
    ],
)
def test_what_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(part)
