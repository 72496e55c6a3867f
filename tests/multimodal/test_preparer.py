"""The media preprocessor: results, errors, order, room, cancelling."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from quire.errors import RequestError
from quire.multimodal import preprocessor as prepare
from tests.multimodal.preparing import SIZE, Made, Processor, image, layout_of, no_collector, until  # noqa: F401


def test_a_job_gives_its_images_in_order():
    preparer = Made(workers=2)
    preparer.submit("job", [image(3), image(7), image(3)], {})
    ((key, images),) = preparer.collect()
    assert key == "job" and [one.layout.tokens for one in images] == [4, 8, 4]
    assert images[0].pixels is images[2].pixels and images[0].digest == images[2].digest != images[1].digest
    assert images[1].pixels.inputs["pixel_values"][0] == 7
    assert preparer.pixel_bytes == 2 * SIZE, "each picture counts once"
    pixels = images[1].pixels
    del images
    assert preparer.pixel_bytes == SIZE and pixels.nbytes == SIZE
    del pixels
    assert preparer.pixel_bytes == 0


def test_settings_make_another_image():
    preparer = Made()
    preparer.submit("a", [image(3)], {})
    preparer.submit("b", [image(3)], {"size": 4})
    (_, (a,)), (_, (b,)) = preparer.collect(2)
    assert a.digest != b.digest and a.pixels is not b.pixels and preparer.processor.calls == [3, 3]


def test_what_has_features_or_pixels_is_not_processed_again():
    preparer = Made()
    preparer.submit("a", [image(3)], {})
    ((_, (first,)),) = preparer.collect()
    preparer.submit("b", [image(3)], {})
    ((_, (second,)),) = preparer.collect()
    assert second.pixels is first.pixels and preparer.processor.calls == [3]
    preparer.features.add(first.digest)
    preparer.submit("c", [image(3)], {})
    ((_, (third,)),) = preparer.collect()
    assert third.pixels is None and third.layout == first.layout and preparer.processor.calls == [3]
    preparer.features.clear()
    del first, second
    assert preparer.pixel_bytes == 0
    preparer.submit("d", [image(3)], {})
    ((_, (fourth,)),) = preparer.collect()
    assert fourth.pixels is not None and preparer.processor.calls == [3, 3]


def test_layouts_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(prepare, "_MOST_LAYOUTS", 3)
    preparer = Made()
    for name in range(10):
        preparer.submit(name, [image(name)], {})
    assert [images[0].layout.tokens for _, images in preparer.collect(10)] == list(range(1, 11))
    assert len(preparer._layouts) <= 3


# Errors


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("it does not fit"), "image 1: it does not fit"),
        (ZeroDivisionError("secret"), "image 1: it cannot be prepared: ZeroDivisionError"),
        (KeyError("pixels"), "image 1: it cannot be prepared: KeyError"),
        (SystemExit(1), "image 1: it cannot be prepared: SystemExit"),
    ],
)
def test_whatever_the_model_raises_of_an_image_is_an_answer(error, message):
    def layout(inputs):
        if inputs["pixel_values"][0] == 9:
            raise type(error)(*error.args)
        return layout_of(inputs)

    preparer = Made(layout=layout)
    preparer.submit("bad", [image(1), image(9), image(2)], {})
    preparer.submit("good", [image(2)], {})
    (bad, answer), (good, images) = preparer.collect(2)
    assert (bad, str(answer)) == ("bad", message) and isinstance(answer, RequestError)
    assert good == "good" and images[0].layout.tokens == 3
    del images
    assert preparer.pixel_bytes == 0 and preparer.processor.calls == [1, 9, 2]


def test_the_place_of_an_image_prepared_again_is_named():
    preparer = Made()
    preparer.submit("again", [b"no image"], {}, urgent=True, first=5)
    ((_, answer),) = preparer.collect()
    assert str(answer).startswith("image 5: it is not an image")


def test_an_error_keeps_nothing_of_what_was_decoded():
    seen = []

    def layout(inputs):
        seen.append(weakref.ref(inputs["pixel_values"]))
        raise ValueError("it does not fit")

    preparer = Made(layout=layout)
    preparer.submit("bad", [image(1)], {})
    ((_, answer),) = preparer.collect()
    assert isinstance(answer, RequestError) and seen[0]() is None


# Order and room


def test_urgent_jobs_go_first_and_the_others_in_order():
    preparer = Made()
    gate = preparer.processor.gates[0] = threading.Event()
    for name in range(4):
        preparer.submit(name, [image(name)], {})
    preparer.submit(4, [image(4)], {}, urgent=True)
    assert preparer.done() == []
    gate.set()
    assert [key for key, _ in preparer.collect(5)] == preparer.processor.calls == [0, 4, 1, 2, 3]


def test_no_job_begins_while_pixels_fill_their_share_but_urgent_ones_do():
    preparer = Made(images=2)
    for name in range(5):
        preparer.submit(name, [image(name), image(name + 10)], {})
    results = preparer.collect(5)
    # With two images exactly the share is not exceeded yet.
    assert [key for key, _ in results] == [0, 1] and preparer.pixel_bytes == 4 * SIZE
    preparer.submit("urgent", [image(20)], {}, urgent=True)
    results += preparer.collect(5)
    assert [key for key, _ in results] == [0, 1, "urgent"] and preparer.processor.calls == [0, 10, 1, 11, 20]
    begun = time.monotonic()
    assert preparer.done(10.0) == [] and time.monotonic() - begun < 5, "it waited, and nothing was under way"
    results.clear()
    for expected in ([2, 3], [4]):
        assert [key for key, _ in preparer.collect(5)] == expected
    assert preparer.pixel_bytes == 0


def test_done_waits_for_what_is_under_way_and_no_longer():
    preparer = Made()
    begun = time.monotonic()
    assert preparer.done(10.0) == [] and time.monotonic() - begun < 5
    gate = preparer.processor.gates[1] = threading.Event()
    preparer.submit("a", [image(1)], {})
    assert preparer.done() == [] and preparer.done(0.01) == []
    threading.Timer(0.05, gate.set).start()
    assert [key for key, _ in preparer.done(20.0)] == ["a"]
    assert time.monotonic() - begun < 15


def test_features_count_as_pixels_until_they_are_let_go_of():
    preparer = Made()
    preparer.submit("a", [{"image_embeds": torch.zeros(5, 32)}], {})
    ((_, images),) = preparer.collect()
    assert images[0].layout.tokens == 5 and preparer.pixel_bytes == 5 * 32 * 4
    del images
    assert preparer.pixel_bytes == 0


def test_pixels_that_go_while_others_are_counted_leave_no_trace():
    """The garbage collector may come at any moment; what it frees must not stay in the account."""
    preparer, results = Made(), []

    class Inputs(dict):
        def values(self):
            results.clear()
            return super().values()

    preparer.submit("a", [image(1)], {})
    results += preparer.collect()
    assert preparer.pixel_bytes == SIZE
    process = preparer.processor
    own = {"plan": process.plan, "digest": process.digest, "__call__": lambda _, *a: Inputs(process(*a))}
    preparer.processor = type("P", (), own)()
    preparer.submit("b", [image(2)], {})
    found = preparer.collect()
    assert not results and preparer.pixel_bytes == SIZE
    del found
    assert preparer.pixel_bytes == 0


# Cancelled and closed


def test_cancelled_wherever_it_is():
    preparer = Made()
    gate = preparer.processor.gates[1] = threading.Event()
    for name in ("running", "queued", "other"):
        preparer.submit(name, [image(1 if name == "running" else 2)], {})
    preparer.submit("urgent", [image(3)], {}, urgent=True)
    for name in ("queued", "urgent", "running", "no such"):
        preparer.cancel(name)
    gate.set()
    results = preparer.collect(4)
    assert [key for key, _ in results] == ["other"] and preparer.processor.calls == [1, 2]
    results.clear()
    assert preparer.pixel_bytes == 0
    preparer.submit("finished", [image(4)], {})
    while preparer._busy:
        time.sleep(0.001)
    assert preparer.pixel_bytes == SIZE
    preparer.cancel("finished")
    assert preparer.pixel_bytes == 0 and preparer.done() == []


def test_a_cancelled_job_makes_way_for_another_of_its_name():
    preparer = Made()
    gate = preparer.processor.gates[1] = threading.Event()
    preparer.submit("a", [image(1)], {})
    preparer.cancel("a")
    preparer.submit("a", [image(2)], {})
    gate.set()
    results = preparer.collect(2)
    assert [(key, images[0].layout.tokens) for key, images in results] == [("a", 3)]


def test_closing_forgets_what_has_not_begun():
    preparer = Made()
    gate = preparer.processor.gates[1] = threading.Event()
    preparer.submit("a", [image(1)], {})
    preparer.submit("b", [image(2)], {})
    preparer.close()
    gate.set()
    assert [key for key, _ in preparer.collect(2)] == ["a"] and preparer.processor.calls == [1]


def test_many_workers_find_what_one_finds():
    jobs = [[image((job * 7 + place) % 50) for place in range(job % 4)] for job in range(60)]
    answers = []
    for workers in (1, 4):
        preparer = Made(workers=workers)
        for name, sources in enumerate(jobs):
            preparer.submit(name, sources, {})
        results = sorted(preparer.collect(len(jobs)), key=lambda pair: pair[0])
        answers.append([(key, [(one.digest, one.layout) for one in images]) for key, images in results])
        different = {one.digest for _, images in results for one in images}
        assert preparer.pixel_bytes == len(different) * SIZE == 50 * SIZE
        results.clear()
        assert preparer.pixel_bytes == 0
    assert answers[0] == answers[1] and len(answers[0]) == len(jobs)
