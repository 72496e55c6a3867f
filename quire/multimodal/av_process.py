"""The parent's end of `av_child.py`: a process for each file of video or sound, with a deadline, that can be ended.

Whatever a file does to its decoder happens in that process, which has limits of memory and processor time, no
environment, and no descriptors but the file and its pipes. Containers are recognised here, by their first bytes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quire.errors import RequestError
from quire.multimodal import av_child
from quire.multimodal.images import AbandonedError
from quire.types import MediaKind


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one kind. forms: FFmpeg's names of containers, by how they begin. taken: what people call these.
    limit: the setting of processor time. instead: what to give where there is no decoder.
    """

    kind: MediaKind
    forms: Mapping[str, re.Pattern[bytes]]
    taken: str
    limit: str
    instead: str


_MOV = re.compile(rb".{4}(?:ftyp|moov|mdat|wide|free|skip|pnot)", re.DOTALL)
_MATROSKA, _OGG = re.compile(rb"\x1aE\xdf\xa3"), re.compile(rb"OggS")
VIDEO_FILES = Files(
    "video",
    {"mov": _MOV, "matroska": _MATROSKA, "avi": re.compile(rb"RIFF.{4}AVI ", re.DOTALL),
     "gif": re.compile(rb"GIF8[79]a"), "ogg": _OGG},
    "MP4/MOV, WebM/Matroska, AVI, GIF, OGG",
    "max_video_seconds",
    "the frames, as images or an array",
)  # fmt: skip
AUDIO_FILES = Files(
    "audio",
    {"wav": re.compile(rb"(?:RIFF|RF64).{4}WAVE", re.DOTALL), "flac": re.compile(rb"fLaC"), "ogg": _OGG, "mov": _MOV,
     "matroska": _MATROSKA, "aiff": re.compile(rb"FORM.{4}AIF[FC]", re.DOTALL),
     "aac": re.compile(rb"\xff[\xf0\xf1\xf8\xf9]"), "mp3": re.compile(rb"ID3|\xff[\xe2-\xfb]")},
    "WAV, FLAC, OGG, MP3, M4A/MP4, WebM/Matroska, AAC, AIFF",
    "max_audio_seconds",
    "the sound as WAV, or its samples as an array",
)  # fmt: skip
_START = "import sys, runpy; sys.path[:] = sys.argv[7:]; runpy.run_path(sys.argv[6], run_name='__main__')"
_CHILD = str(Path(av_child.__file__))
_MEMORY = 2 << 30  # bytes of address space, most of which is FFmpeg itself
_STARTING = 10.0  # seconds that starting may take beside the time for the file, on a busy machine
_WAITING = 15.0  # times the processor's time that may pass by the clock, at a low priority
_POLL_SECONDS = 0.1
_PIECE = 1 << 20  # bytes that are read at once, and that the pipe holds where it may
_MOST_WORDS = 4096


def require(files: Files) -> None:
    """Raise RequestError where PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        raise RequestError(
            f"such files of {files.kind} are decoded by PyAV, which is not installed: pip install 'quire-llm[video]'; "
            f"or give {files.instead}"
        )


def form_of(data: bytes, files: Files) -> str:
    """FFmpeg's name of the container. Raises RequestError for one that is not taken."""
    for name, pattern in files.forms.items():
        if pattern.match(data):
            return name
    raise RequestError(f"it is no {files.kind} in one of the containers {files.taken}: save it as one of these")


class Decoder:
    """A file in the process that decodes it. To be closed, which ends the process.

    files: of what kind it is. seconds: of processor time. gone: whether nobody waits for it any more. Raises
    RequestError for whatever is wrong with the file, and AbandonedError once `gone`.
    """

    def __init__(self, data: bytes, files: Files, seconds: float, gone: Callable[[], bool]) -> None:
        require(files)
        form = form_of(data, files)
        self._files, self._seconds, self._gone = files, seconds, gone
        self._deadline = time.monotonic() + _STARTING + _WAITING * seconds
        with _as_file(data) as file:
            limits = [str(_MEMORY), str(math.ceil(seconds) + 1)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(file.fileno()), form, *limits, files.kind, _CHILD, *_paths()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True,
                pass_fds=[file.fileno()], env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        _widen(self._process.stdout)

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._process.wait()

    def facts(self) -> dict[str, Any]:
        """What the file has in it."""
        tag, size, _, _ = self._head()
        if tag != b"{" or size > _MOST_WORDS:
            raise self._failed()
        found = json.loads(self._read(size))
        assert isinstance(found, dict)
        return found

    def ask(self, wanted: dict[str, Any]) -> None:
        """Say what of it is wanted; then `frames` or `samples` has it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def frames(self, most: int) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """(width, height, quarters to turn, pixels [height * width * 3] uint8) of each frame, none larger than `most`
        pixels."""
        while True:
            tag, width, height, turned = self._head()
            if tag == b"E":
                return
            if tag != b"F" or width * height > most:
                raise self._failed()
            pixels = np.empty(3 * width * height, np.uint8)
            self._fill(pixels.data)
            yield width, height, turned, pixels

    def samples(self, channels: int, most: int) -> Iterator[np.ndarray]:
        """[channels, samples] float32, piece by piece, no more than `most` of each channel in all."""
        while True:
            tag, count, width, _ = self._head()
            if tag == b"E":
                return
            most -= count
            if tag != b"S" or width != channels or most < 0:
                raise self._failed()
            yield np.frombuffer(self._read(4 * count * channels), np.float32).reshape(channels, count)

    def _head(self) -> tuple[bytes, int, int, int]:
        tag, first, second, turned = av_child.HEAD.unpack(self._read(av_child.HEAD.size))
        if tag == b"X":
            raise RequestError(self._read(min(first, _MOST_WORDS)).decode(errors="replace"))
        return tag, first, second, turned

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, data: memoryview) -> None:
        """Read as many bytes as there is room for. Where they lie they stay: other threads wait while Python copies."""
        assert self._process.stdout is not None
        pipe, done, poll = self._process.stdout.fileno(), 0, select.poll()  # `select` knows no descriptor above 1023
        poll.register(pipe, select.POLLIN)
        while done < len(data):
            if self._gone():
                raise AbandonedError
            if time.monotonic() > self._deadline:
                raise self._late()
            if not poll.poll(1000 * _POLL_SECONDS):
                continue
            count = os.readv(pipe, [data[done : done + _PIECE]])
            if not count:
                raise self._failed()
            done += count

    def _failed(self) -> RequestError:
        """The process has ended before its time, or says what it should not."""
        try:
            code = self._process.wait(_POLL_SECONDS * 10)
        except subprocess.TimeoutExpired:
            code = None
        # Of the two signals, the second comes at the hard limit, which is the same.
        return (
            self._late()
            if code in (-24, -9)
            else RequestError(
                "its decoder ended without a word: the file is damaged, or too much for it; save it anew, or smaller"
            )
        )

    def _late(self) -> RequestError:
        return RequestError(
            f"decoding it takes more than {self._seconds:g} s of CPU time: cut it, save it smaller, or raise "
            f"{self._files.limit}"
        )


def _widen(pipe: Any) -> None:
    """A frame in fewer pieces, each of which costs a turn among the threads of Python."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # a user may have only so much of it
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIECE)


def _paths() -> list[str]:
    """Where the child finds PyAV."""
    return [path for path in sys.path if path]


def _as_file(data: bytes) -> BinaryIO:
    """The bytes behind a descriptor, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = os.fdopen(os.memfd_create("quire-media"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    file.flush()
    file.seek(0)
    return file
