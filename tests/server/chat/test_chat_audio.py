"""Chat completions with sounds: parts over HTTP, what is wrong with one, and whoever asks beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import transformers

from tests.multimodal.tiny_audio import ARCHITECTURE, build, encoded, sound, wav
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.usefixtures("one_thread")

PATH = "/v1/chat/completions"
# As Qwen2-Audio's.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'audio' %}<|AUDIO|>{% else %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
CLIP = np.round(sound(1, 0.5) * 32_768).astype(np.float32) / 32_768
LIMITS = {"max_audio_bytes": 100_000, "max_audio_duration": 5.0, "limit_mm_per_prompt": {"audio": 3}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path = build(ARCHITECTURE, "plain", tmp_path_factory.mktemp("audio"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    with LocalServer({"model": str(path), "num_gpu_blocks_override": 400, **LIMITS}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LocalServer) -> Iterator[Any]:
    with server.http() as client:
        yield client


def given(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


def answer(http: Any, *parts: Any, **more: Any) -> Any:
    content = [{"type": "text", "text": "ab"}, *parts, {"type": "text", "text": "c"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return http.post(PATH, json={**body, "return_token_ids": True, **more})


def tokens(http: Any, *parts: Any, **more: Any) -> list[int]:
    found = answer(http, *parts, **more)
    assert found.status_code == 200, found.text
    return list(found.json()["choices"][0]["token_ids"])


def refusal(http: Any, *parts: Any, **more: Any) -> str:
    found = answer(http, *parts, **more)
    assert found.status_code == 400, found.text
    return str(found.json()["error"]["message"])


def test_every_part_that_has_a_sound(http: Any, server: LocalServer) -> None:
    whole = tokens(http, given(wav(CLIP)))
    url = f"data:audio/wav;base64,{base64.b64encode(wav(CLIP)).decode()}"
    for part in (
        given(wav(CLIP, bits=16, floats=False)),
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "audio_url", "audio_url": url},
        {"type": "audio", "url": url},
        {"type": "audio", "audio": url},
    ):
        assert tokens(http, part) == whole
    assert tokens(http, given(wav(sound(2, 0.5)))) != whole or tokens(http, given(wav(sound(3, 0.5)))) != whole
    info = http.get("/server_info").json()
    assert (info["audio"], info["images"], info["videos"]) == (True, False, False)
    server.until_idle()


def test_files_of_other_forms(http: Any) -> None:
    pytest.importorskip("av")
    assert tokens(http, given(encoded(CLIP), "flac")) == tokens(http, given(wav(CLIP)))


def test_a_sound_comes_again_by_its_uuid(http: Any) -> None:
    whole = tokens(http, {**given(wav(CLIP)), "uuid": "clip"})
    assert tokens(http, {"type": "input_audio", "input_audio": None, "uuid": "clip"}) == whole
    assert tokens(http, {"type": "audio_url", "uuid": "clip"}) == whole
    assert "audio 0: nothing is known of the uuid 'other'" in refusal(http, {"type": "audio_url", "uuid": "other"})


def test_a_stream_says_the_same(http: Any) -> None:
    lines = answer(http, given(wav(CLIP)), stream=True).text
    assert lines.rstrip().endswith("[DONE]") and '"finish_reason":"length"' in lines.replace(" ", "")
    told = answer(http, given(b"no sound"), stream=True)
    assert told.status_code == 400 and "audio 0" in told.text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (given(b"RIFF"), "audio 0: it is no audio in one of the containers WAV"),
        (given(wav(CLIP)[:-100]), "audio 0: its WAV header says 32,000 bytes of samples, and 31,900 are there"),
        (given(wav(np.zeros(0, np.float32))), "audio 0: it has no samples"),
        (given(wav(np.full(900, np.nan, np.float32))), "audio 0: it has samples that are infinite or no numbers"),
        (given(wav(np.zeros(20, np.float32))), "audio 0: it is too short"),
        (given(wav(np.zeros(40_000, np.float32), bits=16, floats=False)), "this model hears 2 s: cut it"),
        (given(wav(np.zeros(90_000, np.float32), 9_000, 8, False)), "10 s, and 5 s are allowed: .* max_audio_duration"),
        (given(bytes(100_001)), "more than the 100,000 bytes that are allowed: .* max_audio_bytes"),
        (given(wav(np.zeros((900, 9), np.float32))), "it has 9 channels, and 1 to 8 are taken"),
        ({"type": "input_audio", "input_audio": {"data": "A!", "format": "wav"}}, "audio 0: .*valid base64"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, r"content\[1\].input_audio.format"),
        ({"type": "audio_url", "audio_url": {"url": "/etc/passwd"}}, "must be a URL"),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "file: URLs are off"),
        ({"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/"}}, "http: and https: URLs are off"),
        ({"type": "audio", "audio": [0.0, 0.5]}, "samples do not come as JSON: give a file"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "this model takes no image"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}, "this model takes no video"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(http: Any, part: dict[str, Any], message: str) -> None:
    import re

    told = refusal(http, part)
    assert re.search(message, told), told


def test_too_many(http: Any) -> None:
    assert "has 4 of audio, and 3 are allowed" in refusal(http, *[given(wav(CLIP))] * 4)
    assert len(tokens(http, *[given(wav(CLIP))] * 3)) == 8


def test_neighbours_of_bad_sounds_are_unharmed(http: Any, server: LocalServer) -> None:
    good = [given(wav(sound(number, 0.5))) for number in range(4)]
    alone = [tokens(http, part) for part in good]
    bad = [given(b"ID3" + bytes(999)), given(wav(CLIP)[:90]), given(b"fLaC" + bytes(99)), given(b"OggS" + bytes(99))]
    mixed = [part for pair in zip(good, bad, strict=True) for part in pair] * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda part: answer(http, part), mixed))
    assert [one.status_code for one in found] == [200, 400] * 8
    assert [one.json()["choices"][0]["token_ids"] for one in found[::2]] == alone * 2
    assert all("audio 0" in one.json()["error"]["message"] for one in found[1::2])
    server.until_idle()
