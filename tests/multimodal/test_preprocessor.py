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
    preprocessor = Made(workers=2)
    preprocessor.submit("job", [image(3), image(7), image(3)], {})
    ((key, images),) = preprocessor.collect()
    assert key == "job" and [one.layout.tokens for one in images] == [4, 8, 4]
    assert images[0].pixels is images[2].pixels and images[0].digest == images[2].digest != images[1].digest
    assert images[1].pixels.inputs["pixel_values"][0] == 7
    assert preprocessor.pixel_bytes == 2 * SIZE, "each picture counts once"
    pixels = images[1].pixels
    del images
    assert preprocessor.pixel_bytes == SIZE and pixels.nbytes == SIZE
    del pixels
    assert preprocessor.pixel_bytes == 0


def test_settings_make_another_image():
    preprocessor = Made()
    preprocessor.submit("a", [image(3)], {})
    preprocessor.submit("b", [image(3)], {"size": 4})
    (_, (a,)), (_, (b,)) = preprocessor.collect(2)
    assert a.digest != b.digest and a.pixels is not b.pixels and preprocessor.processor.calls == [3, 3]


def test_what_has_features_or_pixels_is_not_processed_again():
    preprocessor = Made()
    preprocessor.submit("a", [image(3)], {})
    ((_, (first,)),) = preprocessor.collect()
    preprocessor.submit("b", [image(3)], {})
    ((_, (second,)),) = preprocessor.collect()
    assert second.pixels is first.pixels and preprocessor.processor.calls == [3]
    preprocessor.features.add(first.digest)
    preprocessor.submit("c", [image(3)], {})
    ((_, (third,)),) = preprocessor.collect()
    assert third.pixels is None and third.layout == first.layout and preprocessor.processor.calls == [3]
    preprocessor.features.clear()
    del first, second
    assert preprocessor.pixel_bytes == 0
    preprocessor.submit("d", [image(3)], {})
    ((_, (fourth,)),) = preprocessor.collect()
    assert fourth.pixels is not None and preprocessor.processor.calls == [3, 3]


def test_layouts_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(prepare, "_MOST_LAYOUTS", 3)
    preprocessor = Made()
    for name in range(10):
        preprocessor.submit(name, [image(name)], {})
    assert [images[0].layout.tokens for _, images in preprocessor.collect(10)] == list(range(1, 11))
    assert len(preprocessor._layouts) <= 3


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

    preprocessor = Made(layout=layout)
    preprocessor.submit("bad", [image(1), image(9), image(2)], {})
    preprocessor.submit("good", [image(2)], {})
    (bad, answer), (good, images) = preprocessor.collect(2)
    assert (bad, str(answer)) == ("bad", message) and isinstance(answer, RequestError)
    assert good == "good" and images[0].layout.tokens == 3
    del images
    assert preprocessor.pixel_bytes == 0 and preprocessor.processor.calls == [1, 9, 2]


def test_the_place_of_an_image_prepared_again_is_named():
    preprocessor = Made()
    preprocessor.submit("again", [b"no image"], {}, urgent=True, first=5)
    ((_, answer),) = preprocessor.collect()
    assert str(answer).startswith("image 5: it is not an image")


def test_an_error_keeps_nothing_of_what_was_decoded():
    seen = []

    def layout(inputs):
        seen.append(weakref.ref(inputs["pixel_values"]))
        raise ValueError("it does not fit")

    preprocessor = Made(layout=layout)
    preprocessor.submit("bad", [image(1)], {})
    ((_, answer),) = preprocessor.collect()
    assert isinstance(answer, RequestError) and seen[0]() is None


# Order and room


def test_urgent_jobs_go_first_and_the_others_in_order():
    preprocessor = Made()
    gate = preprocessor.processor.gates[0] = threading.Event()
    for name in range(4):
        preprocessor.submit(name, [image(name)], {})
    preprocessor.submit(4, [image(4)], {}, urgent=True)
    assert preprocessor.done() == []
    gate.set()
    assert [key for key, _ in preprocessor.collect(5)] == preprocessor.processor.calls == [0, 4, 1, 2, 3]


def test_no_job_begins_while_pixels_fill_their_share_but_urgent_ones_do():
    preprocessor = Made(images=2)
    for name in range(5):
        preprocessor.submit(name, [image(name), image(name + 10)], {})
    results = preprocessor.collect(5)
    # With two images exactly the share is not exceeded yet.
    assert [key for key, _ in results] == [0, 1] and preprocessor.pixel_bytes == 4 * SIZE
    preprocessor.submit("urgent", [image(20)], {}, urgent=True)
    results += preprocessor.collect(5)
    assert [key for key, _ in results] == [0, 1, "urgent"] and preprocessor.processor.calls == [0, 10, 1, 11, 20]
    begun = time.monotonic()
    assert preprocessor.done(60.0) == [] and time.monotonic() - begun < 30, "it waited, and nothing was under way"
    results.clear()
    for expected in ([2, 3], [4]):
        assert [key for key, _ in preprocessor.collect(5)] == expected
    assert preprocessor.pixel_bytes == 0


def test_done_waits_for_what_is_under_way_and_no_longer():
    preprocessor = Made()
    begun = time.monotonic()
    assert preprocessor.done(60.0) == [] and time.monotonic() - begun < 30
    gate = preprocessor.processor.gates[1] = threading.Event()
    preprocessor.submit("a", [image(1)], {})
    assert preprocessor.done() == [] and preprocessor.done(0.01) == []
    threading.Timer(0.05, gate.set).start()
    assert [key for key, _ in preprocessor.done(60.0)] == ["a"]
    assert time.monotonic() - begun < 50


def test_features_count_as_pixels_until_they_are_let_go_of():
    preprocessor = Made()
    preprocessor.submit("a", [{"image_embeds": torch.zeros(5, 32)}], {})
    ((_, images),) = preprocessor.collect()
    assert images[0].layout.tokens == 5 and preprocessor.pixel_bytes == 5 * 32 * 4
    del images
    assert preprocessor.pixel_bytes == 0


def test_pixels_that_go_while_others_are_counted_leave_no_trace():
    """The garbage collector may come at any moment; what it frees must not stay in the account."""
    preprocessor, results = Made(), []

    class Inputs(dict):
        def values(self):
            results.clear()
            return super().values()

    preprocessor.submit("a", [image(1)], {})
    results += preprocessor.collect()
    assert preprocessor.pixel_bytes == SIZE
    process = preprocessor.processor
    own = {"plan": process.plan, "digest": process.digest, "__call__": lambda _, *a: Inputs(process(*a))}
    preprocessor.processor = type("P", (), own)()
    preprocessor.submit("b", [image(2)], {})
    found = preprocessor.collect()
    assert not results and preprocessor.pixel_bytes == SIZE
    del found
    assert preprocessor.pixel_bytes == 0


# Cancelled and closed


def test_cancelled_wherever_it_is():
    preprocessor = Made()
    gate = preprocessor.processor.gates[1] = threading.Event()
    for name in ("running", "queued", "other"):
        preprocessor.submit(name, [image(1 if name == "running" else 2)], {})
    preprocessor.submit("urgent", [image(3)], {}, urgent=True)
    for name in ("queued", "urgent", "running", "no such"):
        preprocessor.cancel(name)
    gate.set()
    results = preprocessor.collect(4)
    assert [key for key, _ in results] == ["other"] and preprocessor.processor.calls == [1, 2]
    results.clear()
    assert preprocessor.pixel_bytes == 0
    preprocessor.submit("finished", [image(4)], {})
    while preprocessor._busy:
        time.sleep(0.001)
    assert preprocessor.pixel_bytes == SIZE
    preprocessor.cancel("finished")
    assert preprocessor.pixel_bytes == 0 and preprocessor.done() == []


def test_a_cancelled_job_makes_way_for_another_of_its_name():
    preprocessor = Made()
    gate = preprocessor.processor.gates[1] = threading.Event()
    preprocessor.submit("a", [image(1)], {})
    preprocessor.cancel("a")
    preprocessor.submit("a", [image(2)], {})
    gate.set()
    results = preprocessor.collect(2)
    assert [(key, images[0].layout.tokens) for key, images in results] == [("a", 3)]


def test_closing_forgets_what_has_not_begun():
    preprocessor = Made()
    gate = preprocessor.processor.gates[1] = threading.Event()
    preprocessor.submit("a", [image(1)], {})
    preprocessor.submit("b", [image(2)], {})
    preprocessor.close()
    gate.set()
    assert [key for key, _ in preprocessor.collect(2)] == ["a"] and preprocessor.processor.calls == [1]


def test_many_workers_find_what_one_finds():
    jobs = [[image((job * 7 + place) % 50) for place in range(job % 4)] for job in range(60)]
    answers = []
    for workers in (1, 4):
        preprocessor = Made(workers=workers)
        for name, sources in enumerate(jobs):
            preprocessor.submit(name, sources, {})
        results = sorted(preprocessor.collect(len(jobs)), key=lambda pair: pair[0])
        answers.append([(key, [(one.digest, one.layout) for one in images]) for key, images in results])
        different = {one.digest for _, images in results for one in images}
        assert preprocessor.pixel_bytes == len(different) * SIZE == 50 * SIZE
        results.clear()
        assert preprocessor.pixel_bytes == 0
    assert answers[0] == answers[1] and len(answers[0]) == len(jobs)
