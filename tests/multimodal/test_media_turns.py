"""Videos take turns, what is fetched keeps nobody waiting, and fetched files have a limit of memory."""

from __future__ import annotations

import gc
import io
import threading
import time
from functools import cache

import pytest
import torch
from PIL import Image

from quire.config import MediaConfig
from quire.multimodal import jobs
from quire.multimodal import preprocessor as prepare
from quire.multimodal.sources import DecodedMedia, MediaSource, OpenedMedia
from quire.types import MediaLayout
from tests.multimodal.preparing import Made, image, no_collector, until  # noqa: F401


class Videos:
    """Those whose source is a key of `gates` are decoded until that is open, asking all the while whether they may."""

    def __init__(self, *slow: int) -> None:
        self.gates = {name: threading.Event() for name in slow}
        self.decoded: list[int] = []
        self.done: list[int] = []

    def open(self, media, settings, gone):
        def decode() -> DecodedMedia:
            self.decoded.append(media.source)
            while media.source in self.gates and not self.gates[media.source].is_set():
                assert not gone()
                time.sleep(0.001)
            self.done.append(media.source)
            return DecodedMedia(bytes([media.source]), lambda: {"pixels": torch.zeros(4)})

        return OpenedMedia(media, 1, 1, decode)

    def layout(self, inputs):
        return MediaLayout(3)


@pytest.fixture
def impatient(monkeypatch):
    """Whoever has begun is due after whoever has not, and is asked at once."""
    monkeypatch.setattr(jobs, "_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "_DELAY_FACTOR", 1e9)
    monkeypatch.setattr(prepare, "_LOOK_SECONDS", 0.0)


def video(name: int) -> list[MediaSource]:
    return [MediaSource("video", name)]


def test_a_video_that_takes_long_lets_others_past(impatient):
    """It is begun anew when they are done, as often as it must."""
    videos = Videos(0)
    preprocessor = Made(workers=1, others={"video": videos})
    preprocessor.submit("long", video(0), {})
    for name in (1, 2, 3):
        until(lambda: videos.decoded[-1:] == [0])
        preprocessor.submit(name, video(name), {})
        assert [key for key, _ in preprocessor.collect(1)] == [name]
    until(lambda: videos.decoded[-1:] == [0])
    videos.gates[0].set()
    ((key, made),) = preprocessor.collect(1)
    assert key == "long" and made[0].layout.tokens == 3 and videos.done == [1, 2, 3, 0]
    assert videos.decoded == [0, 1, 0, 2, 0, 3, 0]
    media = preprocessor._turns.lanes["media"]
    assert not media.jobs and not media.decoding and not preprocessor._turns.begun and not preprocessor.busy


def test_a_video_alone_is_decoded_in_one_go(impatient):
    videos = Videos(0)
    preprocessor = Made(workers=1, others={"video": videos})
    preprocessor.submit("long", video(0), {})
    preprocessor.submit("image", [image(1)], {})  # which has workers of its own
    assert [key for key, _ in preprocessor.collect(1)] == ["image"]
    videos.gates[0].set()
    assert [key for key, _ in preprocessor.collect(1)] == ["long"] and videos.decoded == [0]


def test_work_in_vain_is_bounded(impatient, monkeypatch):
    """Two that take long do not take turns for ever: each is left alone for longer every time."""
    monkeypatch.setattr(jobs, "_SLICE_SECONDS", 0.001)
    videos = Videos(0, 1)
    preprocessor = Made(workers=1, others={"video": videos})
    for name in (0, 1):
        preprocessor.submit(name, video(name), {})
    until(lambda: len(videos.decoded) > 4)
    assert len(videos.decoded) < 12
    for gate in videos.gates.values():
        gate.set()
    assert {key for key, _ in preprocessor.collect(2)} == {0, 1}


def test_a_video_that_waits_after_a_pause_can_be_cancelled(impatient):
    videos = Videos(0, 1)
    preprocessor = Made(workers=1, others={"video": videos})
    preprocessor.submit(0, video(0), {})
    until(lambda: videos.decoded == [0])
    preprocessor.submit(1, video(1), {})
    until(lambda: 1 in videos.decoded)
    preprocessor.cancel(0)
    videos.gates[1].set()
    assert [key for key, _ in preprocessor.collect(2)] == [1] and not preprocessor._turns.begun


@cache
def picture() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 99).save(file, "PNG")
    return file.getvalue()


class Hosts:
    """URLs that are answered with a picture, those of the host `slow` when the gate is open."""

    def __init__(self, monkeypatch) -> None:
        self.gate, self.asked = threading.Event(), list[str]()
        monkeypatch.setattr(prepare, "read_url", self.read)

    def read(self, url, config, gone, kind):
        self.asked.append(url)
        if "//slow/" in url:
            assert self.gate.wait(20)
        return picture()


def test_a_slow_host_keeps_nobody_waiting(monkeypatch):
    hosts = Hosts(monkeypatch)
    preprocessor = Made(workers=1)
    for number in range(50):
        preprocessor.submit(number, [f"http://slow/{number}.png"], {})
    preprocessor.submit("here", [image(1)], {})
    preprocessor.submit("elsewhere", ["http://quick/a.png"], {})
    assert {key for key, _ in preprocessor.collect(2)} == {"here", "elsewhere"}
    assert 1 <= sum("slow" in url for url in hosts.asked) <= 8
    hosts.gate.set()
    assert {key for key, _ in preprocessor.collect(50)} == set(range(50))


def test_fetched_files_have_a_limit_of_memory(monkeypatch):
    """While others have them; then the next are fetched. Those of a request that has begun are fetched all the same."""
    hosts = Hosts(monkeypatch)
    preprocessor = Made(workers=1)
    preprocessor._config = MediaConfig(file_bytes=1, cache_bytes=4 * len(picture()))
    preprocessor.submit("many", [f"http://quick/{number}.png" for number in range(6)], {})
    held = preprocessor.collect(1)
    assert [key for key, _ in held] == ["many"] and preprocessor.file_bytes == 6 * len(picture())
    preprocessor.submit("next", ["http://quick/next.png"], {})
    assert preprocessor.collect(1) == [] and len(hosts.asked) == 6
    preprocessor.submit("here", [image(1)], {})
    assert [key for key, _ in preprocessor.collect(1)] == ["here"]
    del held
    gc.collect()
    assert preprocessor.file_bytes == 0
    assert [key for key, _ in preprocessor.collect(1)] == ["next"]


def test_closing_ends_what_is_decoded(monkeypatch):
    ended = threading.Event()

    class Endless(Videos):
        def open(self, media, settings, gone):
            self.decoded.append(media.source)
            while not gone():
                time.sleep(0.001)
            ended.set()
            raise prepare.AbandonedError

    videos = Endless()
    preprocessor = Made(workers=1, others={"video": videos})
    preprocessor.submit(0, video(0), {})
    until(lambda: videos.decoded)
    preprocessor.close()
    assert ended.wait(20)
