"""Files of video as attackers send them: time and memory are bounded, and whoever else is served does not notice."""

from __future__ import annotations

import importlib.util
import io
import random
import struct
import time

import numpy as np
import psutil
import pytest

from quire.multimodal import av_child, av_process
from tests.multimodal.clips import clip, compressed, encoded
from tests.multimodal.open_engine import ask, error_of, greedy, nothing_left, open_llm, tokens, wait_until_idle
from tests.multimodal.test_videos import made, one, qwen  # noqa: F401

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def llm(qwen):  # noqa: F811
    return open_llm(
        qwen, max_video_bytes=300_000, max_video_duration=60, max_image_pixels=20_000, max_video_seconds=5,
        max_video_frames=40,
    )  # fmt: skip


@pytest.fixture(scope="module")
def usual(llm):
    """An ordinary prompt and its answer."""
    prompt = one(clip(1, 3))
    return prompt, tokens(llm, prompt)


def decoders():
    """The processes that decode files; other tests have processes of their own."""
    return [one for one in psutil.Process().children() if any("av_child" in word for word in one.cmdline())]


def refused(llm, usual, data, **more):
    """Why a file is refused, beside an ordinary request that is not."""
    prompt, answer = usual
    outputs = ask(llm, [one(data, **more), prompt])
    assert [list(outputs[1].outputs[0].token_ids)] == answer
    nothing_left(llm)
    assert not decoders()
    return error_of(outputs[0])


def many_streams(count):
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        streams = [container.add_stream("mjpeg", rate=1) for _ in range(count)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt = 16, 16, "yuvj420p"
        for stream in streams:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(clip(1, 1, 16, 16)[0], format="rgb24")))
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoded(clip(1, 2, 160, 160)), "160 x 160 pixels, and 20,000 in all are allowed"),
        (lambda: encoded(clip(1, 200, 16, 16), rate=1), "it lasts 200 s, and 60 s are allowed"),
        (lambda: bytes(400_000), "it has more than the 300,000 bytes"),
        (lambda: compressed(clip(1, 9))[:60], "video 0: it cannot be decoded"),
        (lambda: b"\x00\x00\x00\x18ftypmp42" + bytes(999), "video 0: it"),
        (lambda: b"\x1aE\xdf\xa3" + bytes(999), "video 0: it"),
        (lambda: b"RIFF\xff\xff\xff\xffAVI " + bytes(999), "video 0: it"),
        (lambda: b"#EXTM3U\nfile:///etc/passwd", "no video in one of the containers"),
        (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "no video in one of the containers"),
    ],
)
def test_what_is_refused(llm, usual, make, message):
    begun = time.monotonic()
    error = refused(llm, usual, make())
    assert message in error and "/etc" not in error and "0x" not in error
    assert time.monotonic() - begun < 60


def test_many_streams(llm, usual):
    """Most of them are never looked at."""
    prompt, answer = usual
    outputs = ask(llm, [one(many_streams(200)), prompt])
    assert outputs[0].outputs[0].finish_reason in ("length", "error")
    assert [list(outputs[1].outputs[0].token_ids)] == answer
    nothing_left(llm)


def test_more_frames_than_may_be(llm, usual):
    data = encoded(clip(1, 50, 16, 16))
    settings = {"do_sample_frames": False}
    assert "50 frames would be taken, and 40" in refused(llm, usual, data, mm_processor_kwargs=settings)


def test_what_a_header_says_of_length_is_not_believed(llm):
    """A file cut off in its middle has the frames that are there, whatever its header promises."""
    video = clip(2, 30, 24, 24)
    data = encoded(video)
    for share in (0.5, 0.8):
        (output,) = ask(llm, [one(data[: int(len(data) * share)])])
        assert output.outputs[0].finish_reason == "length" or "video 0" in error_of(output)
    nothing_left(llm)


def test_a_decoder_that_takes_too_long_is_ended(llm, usual, monkeypatch):
    monkeypatch.setattr(av_process, "_STARTING", 0.0)
    monkeypatch.setattr(av_process, "_WAITING", 0.0)
    assert "takes more than 5 s of CPU time" in refused(llm, usual, encoded(clip(1, 3)))


def test_an_aborted_request_ends_its_decoder(qwen):  # noqa: F811
    llm = open_llm(qwen)
    engine, data = llm.llm_engine, compressed(clip(1, 40, 100, 100))
    for number in range(3):
        engine.add_request(f"gone {number}", one(data), greedy())
        engine.abort_request(f"gone {number}")
    wait_until_idle(llm)
    nothing_left(llm)
    assert not decoders()


def test_without_a_decoder_frames_are_taken_all_the_same(llm, usual, monkeypatch):
    data = encoded(clip(1, 3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'quire-llm[video]'" in refused(llm, usual, data)


def mutated(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 4, 30])):
        place = rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 200))
        what = rng.randrange(3)
        if what == 0:
            data[place] = rng.randrange(256)
        elif what == 1:
            del data[place : place + rng.randrange(1, 40)]
        else:
            data[place:place] = rng.randbytes(rng.randrange(1, 9))
        if not data:
            return b"x"
    return bytes(data)


def check_mutations(llm, usual, count, seed):
    rng = random.Random(seed)
    sources = [compressed(clip(3, 12, 32, 32)), encoded(clip(4, 6, 24, 24)), encoded(clip(5, 6, 24, 24), "avi")]
    process = psutil.Process()
    before = process.memory_info().rss
    for number in range(count):
        prompt, answer = usual
        outputs = ask(llm, [one(mutated(rng, sources[number % 3])), prompt])
        assert outputs[0].outputs[0].finish_reason in ("length", "error")
        assert [list(outputs[1].outputs[0].token_ids)] == answer
    nothing_left(llm)
    assert not decoders()
    assert process.memory_info().rss - before < 200 << 20


def test_mutated_files(llm, usual):
    check_mutations(llm, usual, 3, 1)


@pytest.mark.slow
def test_many_mutated_files(llm, usual):
    check_mutations(llm, usual, 300, 2)


def turned(data, matrix):
    """An MP4 that says of itself how it is to be turned, as telephones write it."""
    data = bytearray(data)
    place = data.index(b"tkhd") + 44  # behind times, numbers and layers
    data[place : place + 36] = struct.pack(">9i", *matrix)
    return bytes(data)


def test_turned_files(qwen):  # noqa: F811
    """Frames are shown as players show them."""
    one_turn = 1 << 16
    data = compressed(clip(1, 4))
    with av.open(io.BytesIO(data)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    llm = open_llm(qwen)
    plain = tokens(llm, one(frames))
    for quarters, matrix in ((3, (0, one_turn, 0, -one_turn, 0)), (1, (0, -one_turn, 0, one_turn, 0))):
        found = tokens(llm, one(turned(data, (*matrix, 0, 0, 0, 1 << 30))))
        assert found == tokens(llm, one(np.ascontiguousarray(np.rot90(frames, quarters, (1, 2))))) != plain


@pytest.mark.parametrize(("between", "seeks"), [(1000, 1), (60, 4)])
def test_key_frames_are_gone_to_where_they_are_nearer(between, seeks):
    """Of a file with one key frame, each frame is decoded once."""
    data, found = compressed(clip(1, 240, 16, 16), g=between, bf=0, sc_threshold=0), []

    class Counted:
        def __init__(self, container) -> None:
            self._container = container

        def __getattr__(self, name):
            return getattr(self._container, name)

        def seek(self, *given, **more):
            found.append(given)
            self._container.seek(*given, **more)

    out, expected = io.BytesIO(), io.BytesIO()
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        _, times, keys = av_child.look_at_video(container, stream)
        wanted = {"places": [30, 90, 150, 210], "pixels": 100_000}
        av_child.send_frames(Counted(container), stream, times, keys, wanted, out)
    with av.open(io.BytesIO(data)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in (30, 90, 150, 210):
                expected.write(frame.to_ndarray(format="rgb24").tobytes())
    frames = out.getvalue()
    size, head = 3 * 16 * 16, av_child.HEAD.size
    shown = b"".join(frames[at + head : at + head + size] for at in range(0, 4 * (size + head), size + head))
    assert shown == expected.getvalue() and len(found) == seeks
