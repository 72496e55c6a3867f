"""What requests share: blocks before an image and behind equal ones, features of equal images, and nothing else."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.multimodal.open_engine import (
    all_ready,
    alone,
    ask,
    count_encodes,
    drive,
    greedy,
    nothing_left,
    one,
    open_llm,
    prompt,
    tokens,
    until,
)  # fmt: skip
from tests.multimodal.tiny_vision import IMAGE, picture

BLOCK = 4
BEFORE = range(5, 14)  # two full blocks, and one token beside the image


@pytest.fixture
def llm(path):
    return open_llm(path, block_size=BLOCK)


def reused(llm, given) -> tuple[int, int]:
    """(cached tokens, length) of a prompt that is asked now."""
    output = ask(llm, [given])[0]
    assert output.outputs[0].finish_reason == "length", output
    return output.num_cached_tokens, len(output.prompt_token_ids)


def test_prompts_that_differ_in_the_image_alone_share_what_is_before_it(llm, path):
    a, b = (one(picture(number, (24, 24)), before=BEFORE) for number in (1, 2))
    expected = alone(path, a, b)
    assert expected[0] != expected[1]
    assert tokens(llm, a) == expected[:1]
    assert reused(llm, b)[0] == 2 * BLOCK
    for given, answer in ((b, expected[1]), (a, expected[0])):
        cached, length = reused(llm, given)
        assert cached == (length - 1) // BLOCK * BLOCK, "the whole prompt was known"
        assert tokens(llm, given) == [answer]
    nothing_left(llm)


def test_running_requests_that_differ_in_the_image_alone_own_different_blocks(llm):
    engine = llm.llm_engine
    for name, number in (("a", 1), ("b", 2)):
        engine.add_request(name, one(picture(number, (24, 24)), before=BEFORE), greedy(30))
        all_ready(engine)
        until(engine, lambda name=name: engine.core.requests[name].sequences[0].output_ids)
    a, b = (engine.scheduler.kv.blocks(engine.core.requests[name].sequences[0].id) for name in "ab")
    assert a[:2] == b[:2] and not set(a[2:]) & set(b)
    assert len(drive(engine)) == 2
    nothing_left(llm)


def test_an_image_at_another_place_is_not_encoded_again(llm, path):
    image = picture(1, (30, 100))
    prompts = [
        one(image),
        one(image, before=[9, 9, 9]),
        prompt([5, IMAGE, 6, IMAGE, 7], [image, image]),
        prompt([5, IMAGE, IMAGE], [picture(2, (24, 24)), image]),
        one(image, before=BEFORE, cache_salt="tenant"),
    ]
    expected, calls = alone(path, *prompts), count_encodes(llm)
    assert tokens(llm, *prompts) == expected
    assert len(calls) == 3  # the two pictures, and the tenant's own of the first
    assert [tokens(llm, given)[0] for given in prompts] == expected
    features = llm.llm_engine.scheduler.encoder.features
    assert len(calls) == features.misses == len(features) == 3 and features.hits > 0
    nothing_left(llm)


def test_a_reshaped_image_is_another_one(llm, path):
    wide = np.asarray(picture(1, (100, 30)))
    tall = wide.reshape(100, 30, 3)
    assert wide.tobytes() == tall.tobytes()
    prompts = [one(wide, before=BEFORE), one(tall, before=BEFORE)]
    expected, calls = alone(path, *prompts), count_encodes(llm)
    assert expected[0] != expected[1]
    assert tokens(llm, *prompts) == expected and len(calls) == 2
    other = open_llm(path, block_size=BLOCK)
    assert [reused(other, given)[0] for given in prompts] == [0, 2 * BLOCK]
    nothing_left(llm)


def test_settings_of_the_processor_make_another_image(llm, path):
    image = picture(1, (24, 24))
    plain, raw = one(image, before=BEFORE), one(image, before=BEFORE, mm_processor_kwargs={"do_normalize": False})
    mean = one(image, before=BEFORE, mm_processor_kwargs={"image_mean": [0.5, 0.5, 0.5]})
    near = one(image, before=BEFORE, mm_processor_kwargs={"image_mean": [0.5, 0.5, 0.5000001]})
    calls = count_encodes(llm)
    assert [reused(llm, given)[0] for given in (plain, raw, mean, near)] == [0, 8, 8, 8]
    assert len(calls) == 4
    assert tokens(llm, plain, raw) == alone(path, plain, raw)
    # The engine's own setting does what a request's does.
    other = open_llm(path, mm_processor_kwargs={"do_normalize": False})
    assert tokens(other, plain) == tokens(llm, raw) != tokens(llm, plain)
    assert tokens(other, one(image, before=BEFORE, mm_processor_kwargs={"do_normalize": True})) == tokens(llm, plain)
    nothing_left(llm)


def test_all_forms_of_an_image_are_one(llm):
    image, buffer = picture(1, (30, 100)), io.BytesIO()
    image.save(buffer, "PNG")
    data = buffer.getvalue()
    forms = [
        image, np.asarray(image), data, bytearray(data), Image.open(io.BytesIO(data)), image.convert("RGBA"),
        "data:image/png;base64," + base64.b64encode(data).decode(),
    ]  # fmt: skip
    calls = count_encodes(llm)
    answers = tokens(llm, *(one(form, before=BEFORE) for form in forms))
    assert answers == answers[:1] * len(forms) and len(calls) == 1
    assert all(reused(llm, one(form, before=BEFORE))[0] > 2 * BLOCK for form in forms)
    nothing_left(llm)


def test_a_file_that_pillow_has_not_read_yet_may_be_in_many_requests(llm, tmp_path):
    """Pillow decodes when pixels are first asked for, and not for two threads at once."""
    picture(1, (900, 900)).save(tmp_path / "a.png")
    lazy = [Image.open(tmp_path / "a.png") for _ in range(3)]
    answers = [tokens(llm, *(one(image) for _ in range(6))) for image in lazy]
    assert answers == [answers[0][:1] * 6] * 3
    nothing_left(llm)
