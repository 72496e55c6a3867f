"""The media preprocessor: whoever sends much waits for it, and nobody else does."""

from __future__ import annotations

import threading
import time

from quire.config import MediaConfig
from quire.multimodal import preprocessor as prepare
from quire.multimodal.images import AbandonedError
from tests.multimodal.preparing import SIZE, Made, Processor, image, layout_of, no_collector, until  # noqa: F401

# Whoever sends much waits for it, and nobody else


def test_a_job_that_takes_long_lets_others_past(monkeypatch):
    monkeypatch.setattr(prepare, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(prepare, "_DELAY_FACTOR", 1e9)
    preparer = Made()
    gate = preparer.processor.gates[0] = threading.Event()
    preparer.submit("many", [image(0), image(10), image(11)], {})
    preparer.submit("one", [image(1)], {})
    preparer.submit("another", [image(2)], {})
    gate.set()
    results = preparer.collect(3)
    assert preparer.processor.calls == [0, 1, 2, 10, 11]
    assert [key for key, _ in results] == ["one", "another", "many"]
    assert [one.layout.tokens for one in results[2][1]] == [1, 11, 12]


def test_a_cancelled_job_prepares_no_further_image():
    preparer = Made()
    gate = preparer.processor.gates[1] = threading.Event()
    preparer.submit("a", [image(1), image(2), image(3)], {})
    preparer.submit("b", [image(4)], {})
    until(lambda: preparer.processor.calls)
    preparer.cancel("a")
    gate.set()
    assert [key for key, _ in preparer.collect(2)] == ["b"] and preparer.processor.calls == [1, 4]
    assert preparer.pixel_bytes == 0


def test_a_cancelled_job_stops_while_it_reads(monkeypatch):
    begun, gone = threading.Event(), []

    def reading(source, config, item, is_gone):
        begun.set()
        while not is_gone():
            time.sleep(0.001)
        gone.append(source)
        raise AbandonedError

    monkeypatch.setattr(prepare, "read_source", reading)
    preparer = Made()
    preparer.submit("a", ["https://host/a.png", image(2)], {})
    assert begun.wait(20)
    preparer.cancel("a")
    monkeypatch.undo()
    preparer.submit("b", [image(4)], {})
    assert [key for key, _ in preparer.collect(2)] == ["b"] and preparer.processor.calls == [4] and len(gone) == 1


def test_large_images_leave_a_worker_to_others(monkeypatch):
    monkeypatch.setattr(prepare, "_LARGE_PIXELS", 3)  # an image has 4 pixels
    preparer = Made(workers=2)
    gates = [preparer.processor.gates.setdefault(name, threading.Event()) for name in (1, 2)]
    preparer.submit("large", [image(1), image(11)], {})
    until(lambda: preparer.processor.calls == [1])
    preparer.submit("as large", [image(2)], {})
    preparer.submit("small", [image(3)[:1, :1]], {})
    assert [key for key, _ in preparer.collect(1)] == ["small"]
    assert preparer.processor.calls == [1, 3]
    for gate in gates:
        gate.set()
    assert {key for key, _ in preparer.collect(2)} == {"large", "as large"}
    assert sorted(preparer.processor.calls) == [1, 2, 3, 11] and not preparer._decoding


def test_small_images_do_not_keep_a_large_one_out_for_ever(monkeypatch):
    """One that fits beside no other, among others of which some are always being decoded."""
    monkeypatch.setattr(prepare, "_LARGE_PIXELS", 3)
    preparer = Made(workers=2)
    preparer._config = MediaConfig(workers=2, max_image_pixels=4)
    gates = {name: preparer.processor.gates.setdefault(name, threading.Event()) for name in range(1, 60)}
    calls = preparer.processor.calls
    preparer.submit(1, [image(1)[:1, :1]], {})
    until(lambda: calls == [1])
    preparer.submit("large", [image(100)], {})
    until(lambda: preparer._busy == 1 and preparer._begun)
    for name in range(2, 60):
        preparer.submit(name, [image(name)[:1, :1]], {})
        until(lambda name=name: name in calls or preparer._busy == 1)
        gates[name - 1].set()
        until(lambda name=name: name in calls or 100 in calls)
        if 100 in calls:
            break
    assert 100 in calls and 2 < len(calls) < 40
    for gate in gates.values():
        gate.set()
    assert len(preparer.collect(60)) == name + 1 and not preparer._decoding and not preparer._begun


def test_a_large_image_that_waits_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(prepare, "_LARGE_PIXELS", 3)
    preparer = Made(workers=2)
    gate = preparer.processor.gates[1] = threading.Event()
    preparer.submit(1, [image(1)], {})
    until(lambda: preparer.processor.calls == [1])
    preparer.submit(2, [image(2)], {})
    until(lambda: preparer._busy == 1)
    preparer.cancel(2)
    gate.set()
    assert [key for key, _ in preparer.collect(2)] == [1] and preparer.processor.calls == [1] and not preparer._begun


def test_images_that_are_decoded_at_once_have_no_more_pixels_than_the_largest_may(monkeypatch):
    monkeypatch.setattr(prepare, "_LARGE_PIXELS", 3)
    preparer, most, now = Made(workers=4), [], []
    preparer._config = MediaConfig(workers=4, max_image_pixels=9)
    process = type(preparer.processor).__call__

    def watched(self, picture, settings):
        now.append(picture.image.width * picture.image.height)
        most.append(sum(now))
        time.sleep(0.002)
        now.remove(picture.image.width * picture.image.height)
        return process(self, picture, settings)

    monkeypatch.setattr(type(preparer.processor), "__call__", watched)
    for name in range(12):
        preparer.submit(name, [image(name)], {})
    assert len(preparer.collect(12)) == 12 and 4 <= max(most) <= 8
