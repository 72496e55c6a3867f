"""The media preprocessor: whoever sends much waits for it, and nobody else does."""

from __future__ import annotations

import threading
import time

import pytest

from quire.errors import RequestError
from quire.multimodal import jobs, turns
from quire.multimodal import preprocessor as prepare
from quire.multimodal.images import AbandonedError
from quire.multimodal.sources import MediaSource
from tests.multimodal.preparing import SIZE, Made, Processor, image, layout_of, no_collector, until  # noqa: F401

# Whoever sends much waits for it, and nobody else


def test_a_job_that_takes_long_lets_others_past(monkeypatch):
    monkeypatch.setattr(jobs, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "_DELAY_FACTOR", 1e9)
    preprocessor = Made()
    gate = preprocessor.processor.gates[0] = threading.Event()
    preprocessor.submit("many", [image(0), image(10), image(11)], {})
    preprocessor.submit("one", [image(1)], {})
    preprocessor.submit("another", [image(2)], {})
    gate.set()
    results = preprocessor.collect(3)
    assert preprocessor.processor.calls == [0, 1, 2, 10, 11]
    assert [key for key, _ in results] == ["one", "another", "many"]
    assert [one.layout.tokens for one in results[2][1]] == [1, 11, 12]


def test_a_cancelled_job_prepares_no_further_image():
    preprocessor = Made()
    gate = preprocessor.processor.gates[1] = threading.Event()
    preprocessor.submit("a", [image(1), image(2), image(3)], {})
    preprocessor.submit("b", [image(4)], {})
    until(lambda: preprocessor.processor.calls)
    preprocessor.cancel("a")
    gate.set()
    assert [key for key, _ in preprocessor.collect(2)] == ["b"] and preprocessor.processor.calls == [1, 4]
    assert preprocessor.pixel_bytes == 0


def test_a_cancelled_job_stops_while_it_reads(monkeypatch):
    begun, gone = threading.Event(), []

    def reading(source, config, is_gone, kind):
        begun.set()
        while not is_gone():
            time.sleep(0.001)
        gone.append(source)
        raise AbandonedError

    monkeypatch.setattr(prepare, "read_url", reading)
    preprocessor = Made()
    preprocessor.submit("a", ["https://host/a.png", image(2)], {})
    assert begun.wait(20)
    preprocessor.cancel("a")
    monkeypatch.undo()
    preprocessor.submit("b", [image(4)], {})
    assert (
        [key for key, _ in preprocessor.collect(2)] == ["b"] and preprocessor.processor.calls == [4] and len(gone) == 1
    )


def test_large_images_leave_a_worker_to_others(monkeypatch):
    monkeypatch.setattr(turns, "_LARGE_PIXELS", 3)  # an image has 4 pixels
    preprocessor = Made(workers=2)
    gates = [preprocessor.processor.gates.setdefault(name, threading.Event()) for name in (1, 2)]
    preprocessor.submit("large", [image(1), image(11)], {})
    until(lambda: preprocessor.processor.calls == [1])
    preprocessor.submit("as large", [image(2)], {})
    preprocessor.submit("small", [image(3)[:1, :1]], {})
    assert [key for key, _ in preprocessor.collect(1)] == ["small"]
    assert preprocessor.processor.calls == [1, 3]
    for gate in gates:
        gate.set()
    assert {key for key, _ in preprocessor.collect(2)} == {"large", "as large"}
    assert sorted(preprocessor.processor.calls) == [1, 2, 3, 11] and not preprocessor._turns.lanes["image"].decoding


def test_small_images_do_not_keep_a_large_one_out_for_ever(monkeypatch):
    """One that fits beside no other, among others of which some are always being decoded."""
    monkeypatch.setattr(turns, "_LARGE_PIXELS", 3)
    preprocessor = Made(workers=2)
    preprocessor._turns.lanes["image"].most_pixels = 4
    gates = {name: preprocessor.processor.gates.setdefault(name, threading.Event()) for name in range(1, 60)}
    calls = preprocessor.processor.calls
    preprocessor.submit(1, [image(1)[:1, :1]], {})
    until(lambda: calls == [1])
    preprocessor.submit("large", [image(100)], {})
    until(lambda: preprocessor._busy == 1 and preprocessor._turns.begun)
    for name in range(2, 60):
        preprocessor.submit(name, [image(name)[:1, :1]], {})
        until(lambda name=name: name in calls or preprocessor._busy == 1)
        gates[name - 1].set()
        until(lambda name=name: name in calls or 100 in calls)
        if 100 in calls:
            break
    assert 100 in calls and 2 < len(calls) < 40
    for gate in gates.values():
        gate.set()
    assert (
        len(preprocessor.collect(60)) == name + 1
        and not preprocessor._turns.lanes["image"].decoding
        and not preprocessor._turns.begun
    )


def test_a_large_image_that_waits_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(turns, "_LARGE_PIXELS", 3)
    preprocessor = Made(workers=2)
    gate = preprocessor.processor.gates[1] = threading.Event()
    preprocessor.submit(1, [image(1)], {})
    until(lambda: preprocessor.processor.calls == [1])
    preprocessor.submit(2, [image(2)], {})
    until(lambda: preprocessor._busy == 1)
    preprocessor.cancel(2)
    gate.set()
    assert (
        [key for key, _ in preprocessor.collect(2)] == [1]
        and preprocessor.processor.calls == [1]
        and not preprocessor._turns.begun
    )


def test_images_that_are_decoded_at_once_have_no_more_pixels_than_the_largest_may(monkeypatch):
    monkeypatch.setattr(turns, "_LARGE_PIXELS", 3)
    preprocessor, most, now = Made(workers=4), [], []
    preprocessor._turns.lanes["image"].most_pixels = 9
    process = type(preprocessor.processor).__call__

    def watched(self, picture, settings):
        now.append(picture.image.width * picture.image.height)
        most.append(sum(now))
        time.sleep(0.002)
        now.remove(picture.image.width * picture.image.height)
        return process(self, picture, settings)

    monkeypatch.setattr(type(preprocessor.processor), "__call__", watched)
    for name in range(12):
        preprocessor.submit(name, [image(name)], {})
    assert len(preprocessor.collect(12)) == 12 and 4 <= max(most) <= 8


class Slow:
    """Videos of which it takes long to know that they are none."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), list[int]()

    def open(self, media, settings, gone):
        self.begun.append(media.source)
        assert self.gate.wait(20)
        raise RequestError(f"{media.name}: it is damaged")

    def layout(self, inputs):
        raise AssertionError


@pytest.mark.parametrize("workers", [1, 2])
def test_images_go_past_videos(workers):
    slow = Slow()
    preprocessor = Made(workers=workers, others={"video": slow})
    for number in range(4):
        preprocessor.submit(f"video {number}", [MediaSource("video", number)], {})
    for number in (1, 2):
        preprocessor.submit(f"image {number}", [image(number)], {})
        assert [key for key, _ in preprocessor.collect(1)] == [f"image {number}"]
    assert sorted(slow.begun) == list(range(workers))
    slow.gate.set()
    assert sorted(key for key, _ in preprocessor.collect(4)) == [f"video {number}" for number in range(4)]
    assert sorted(slow.begun) == [0, 1, 2, 3] and not preprocessor._turns.lanes["media"].jobs
