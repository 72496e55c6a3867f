"""Whatever is wrong with an image is its own request's error, and nobody else notices."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.multimodal.open_engine import (
    KINDS,
    all_ready,
    ask,
    drive,
    error_of,
    greedy,
    nothing_left,
    one,
    open_llm,
    prompt,
    tokens,
    watch_encodes,
)
from tests.multimodal.tiny_vision import IMAGE, picture


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG that declares 30,000 x 30,000 pixels and has next to nothing behind that."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def gif() -> bytes:
    frames = [Image.new("P", (8, 8), number % 256) for number in range(5000)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


BAD: dict[str, tuple[Any, str]] = {
    "truncated": (encoded(picture(1, (90, 90)))[:900], "cannot be decoded"),
    "no bytes": (b"", "no bytes"),
    "bomb": (bomb(), "it declares more than 50,000,000 pixels"),
    "text": (b"just some text in a file that is called a.png", "not an image in one of the formats PNG, JPEG"),
    "16 bits": (encoded(Image.new("I;16", (30, 30), 9000)), "more than 8 bits a channel"),
    "floats": (np.zeros((8, 8, 3), np.float32), "float32"),
    "no pixels": (np.zeros((0, 8, 3), np.uint8), "no pixels"),
    "nothing": (None, "got NoneType"),
    "URL": ("https://host/a.png", "allowed_media_domains"),
    "file": ("file:///etc/passwd", "allowed_local_media_path"),
}
ODD: dict[str, Any] = {
    "1 x 1": picture(1, (1, 1)),
    "1 x 20,000": picture(1, (1, 20_000)),
    "GIF of 5,000 frames": gif(),
    "CMYK": encoded(picture(1, (30, 30)).convert("CMYK"), "JPEG"),
}


@pytest.fixture(scope="module")
def llm(path):
    """One for all tests of a kind: each leaves it as it was."""
    return open_llm(path, max_num_batched_tokens=40)


@pytest.fixture(scope="module")
def neighbours(path) -> list[tuple[dict, list[int]]]:
    """Requests, and what they answer in a fresh engine."""
    prompts = [prompt([5, 6, 7]), one(picture(3, (30, 100))), prompt([8, IMAGE, IMAGE], [picture(4, (24, 24))] * 2)]
    return list(zip(prompts, tokens(open_llm(path), *prompts), strict=True))


def ask_at_once(llm, prompts: list[Any]) -> list[Any]:
    engine = llm.llm_engine
    for number, given in enumerate(prompts):
        engine.add_request(str(number), given, greedy())
    all_ready(engine)
    finished = drive(engine)
    return [finished[str(number)] for number in range(len(prompts))]


def between(neighbours, bad: Any) -> list[Any]:
    """Some requests with a bad one between them, which is twice in the batch."""
    given = [request for request, _ in neighbours]
    return [given[0], bad, *given[1:], bad]


def check_neighbours(outputs, neighbours) -> None:
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert [answers[0], *answers[2:4]] == [answer for _, answer in neighbours]


ONE_KIND = pytest.mark.parametrize("kind", KINDS[:1], indirect=True, ids=["llava"])


@ONE_KIND  # the model has no part in it
@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_and_harms_nobody(llm, neighbours, name):
    source, message = BAD[name]
    good = picture(5, (24, 24))
    bad = prompt([5, IMAGE, 6, IMAGE, 7, IMAGE], [good, source, good])
    outputs = ask(llm, between(neighbours, bad))
    for output in (outputs[1], outputs[4]):
        assert f"request {output.request_id}: image 1: " in error_of(output) and message in error_of(output)
        assert "0x" not in error_of(output)
    check_neighbours(outputs, neighbours)
    nothing_left(llm)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_image_is_served_or_named(llm, kind, neighbours, name):
    given = prompt([5, IMAGE, 6, IMAGE, 7], [picture(5, (24, 24)), ODD[name]])
    outputs = ask(llm, between(neighbours, given))
    if kind.name == "qwen" and "20,000" in name:
        assert "image 1: " in error_of(outputs[1]) and "aspect ratio" in error_of(outputs[1])
    else:
        assert outputs[1].outputs[0].token_ids == outputs[4].outputs[0].token_ids
        assert outputs[1].outputs[0].finish_reason == "length"
    check_neighbours(outputs, neighbours)
    nothing_left(llm)


@pytest.mark.parametrize("together", [False, True])
def test_an_image_that_cannot_be_encoded_fails_its_requests_alone(path, neighbours, together):
    llm, poison = open_llm(path), picture(6, (48, 48))
    processor = llm.llm_engine.media.preprocessor.processor._processor
    refused = processor(poison, return_tensors="pt")["pixel_values"]

    def fail(inputs):
        if torch.equal(inputs["pixel_values"], refused):
            raise RuntimeError("the tower is down")

    bad = [one(poison), prompt([5, IMAGE, 6, IMAGE], [picture(3, (30, 100)), poison]), one(poison, before=[9])]
    good, answers = [given for given, _ in neighbours], [answer for _, answer in neighbours]
    end = watch_encodes(llm, fail)
    for batch in [[*good, *bad, *good]] if together else [[bad[0]], good, [bad[1], bad[2]], good]:
        # All images ready before the first step: some are encoded with the bad one.
        outputs = ask_at_once(llm, batch) if together else ask(llm, batch)
        for given, output in zip(batch, outputs, strict=True):
            if given in good:
                assert output.outputs[0].token_ids == answers[good.index(given)]
            else:
                assert error_of(output) == "RuntimeError: the tower is down"
        nothing_left(llm)
    end()
    assert tokens(llm, *bad, *good) == [*tokens(open_llm(path), *bad), *answers]
    nothing_left(llm)


def test_a_step_that_fails_once_costs_nobody_anything(path, neighbours):
    llm, calls = open_llm(path), []

    def fail_once(inputs):
        calls.append(inputs)
        if len(calls) == 2:
            raise RuntimeError("for once")

    watch_encodes(llm, fail_once)
    outputs = ask_at_once(llm, [given for given, _ in neighbours])
    assert [output.outputs[0].token_ids for output in outputs] == [answer for _, answer in neighbours]
    # Of two images the second is encoded again; both are where they went together.
    assert len(calls) == (4 if llm.llm_engine.executor.runner.model.images_together > 1 else 3)
    nothing_left(llm)


SEEDS = [
    encoded(picture(7, (16, 16))), encoded(picture(7, (16, 16)).convert("P")), encoded(picture(7, (16, 16)), "JPEG"),
    encoded(picture(7, (16, 16)), "WEBP"), encoded(picture(7, (16, 16)).convert("P"), "GIF"),
    encoded(picture(7, (16, 16)), "BMP"),
]  # fmt: skip


@ONE_KIND
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_harm_nobody(llm, neighbours):
    rng, damaged = random.Random(1), []
    for number in range(60):
        data = bytearray(SEEDS[number % len(SEEDS)])
        for _ in range(rng.choice([1, 1, 3])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        damaged.append(one(bytes(data[: rng.choice([len(data), len(data), rng.randrange(1, len(data))])])))
    batch = [given for given, _ in neighbours] + damaged
    outputs = ask(llm, batch)
    assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == [answer for _, answer in neighbours]
    failed = [output for output in outputs[3:] if output.outputs[0].finish_reason == "error"]
    assert 5 < len(failed) < 55
    assert all("image 0: " in error_of(output) for output in failed)
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs[3:] if output not in failed)
    nothing_left(llm)
