"""The process that decodes a file: it goes behind everybody, and ends whatever becomes of whoever started it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from quire.multimodal import av_child
from quire.multimodal.av_process import VIDEO_FILES, Decoder
from tests.multimodal.clips import clip, compressed, encoded

pytest.importorskip("av")

ABANDONED = """
import sys, time
from quire.multimodal import av_child
from quire.multimodal.av_process import VIDEO_FILES, Decoder
decoder = Decoder(sys.stdin.buffer.read(), VIDEO_FILES, 20, lambda: False)
decoder.facts()
if sys.argv[1] == "asked":
    decoder.ask({"places": list(range(40)), "pixels": 10**6})
print(decoder._process.pid, flush=True)
time.sleep(600)
"""


def opened(data: bytes, seconds: float = 20) -> Decoder:
    return Decoder(data, VIDEO_FILES, seconds, lambda: False)


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for_the_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while not ended(process):
        assert time.monotonic() < deadline, process.status()
        time.sleep(0.01)


def test_it_goes_behind_everybody():
    with opened(compressed(clip(1, 4))) as decoder:
        decoder.facts()
        assert psutil.Process(decoder._process.pid).nice() == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)


def test_descriptors_may_have_high_numbers():
    """As in a server with a thousand connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    taken = []
    try:
        while not taken or taken[-1] < 1100:
            taken.append(os.dup(0))
        with opened(encoded(clip(2, 5, 33, 47))) as decoder:
            assert decoder.facts()["width"] == 47
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_frames_are_what_was_decoded():
    video = clip(2, 5, 33, 47)
    with opened(encoded(video)) as decoder:
        decoder.facts()
        decoder.ask({"places": [0, 2, 4], "pixels": 33 * 47})
        frames = list(decoder.frames(33 * 47))
    assert [one[:3] for one in frames] == [(47, 33, 0)] * 3
    assert all(
        np.array_equal(one[3].reshape(33, 47, 3), video[place]) for one, place in zip(frames, (0, 2, 4), strict=True)
    )


@pytest.mark.parametrize("state", ["looked at", "asked"])
def test_it_ends_when_whoever_started_it_is_killed(state):
    """Be it waiting for a word, or for its frames to be read."""
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", ABANDONED, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(compressed(clip(1, 40, 200, 200)))
        parent.stdin.close()
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
    wait_for_the_end(child)


def test_it_ends_by_itself_at_last():
    """Nobody closes its pipes, and nobody reads them."""
    script = "from quire.multimodal import av_child as c; c._LIFE = 1, 0; c._NICE = 0; c.limit(2 << 30, 30); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, cwd=Path(av_child.__file__).parents[2]
    )
    assert process.wait(60) == -signal.SIGALRM


def test_a_file_that_is_closed_in_the_middle_leaves_nothing():
    with opened(compressed(clip(1, 40, 200, 200))) as decoder:
        decoder.facts()
        decoder.ask({"places": list(range(40)), "pixels": 10**6})
        next(decoder.frames(10**6))
        child = psutil.Process(decoder._process.pid)
    assert not child.is_running()


def test_the_file_has_no_name_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with opened(compressed(clip(1, 4))) as decoder:
        decoder.facts()
        assert not list(tmp_path.iterdir())
