"""WAV files (RIFF, RF64) of plain samples: whole numbers of 8 to 32 bits, and floats.

What the header says is checked against the bytes that are there, before any sample is looked at.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np

from quire.errors import RequestError

_HEAD = re.compile(rb"(?:RIFF|RF64).{4}WAVE", re.DOTALL)
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# The rest of an extensible format's sixteen bytes, behind the number of the format.
_SUBFORMAT = bytes.fromhex("000000001000800000aa00389b71")
_OPEN_END = 0xFFFFFFFF  # a length that whoever wrote the header did not know
_MOST_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class Wav:
    """What a header says. rate: samples a second and channel. bits: of a sample. floats: whether they are floats.
    begin, end: of the samples in the file's bytes, whole ones of all channels."""

    rate: int
    channels: int
    bits: int
    floats: bool
    begin: int
    end: int

    @property
    def samples(self) -> int:
        """Of each channel."""
        return (self.end - self.begin) // (self.channels * self.bits // 8)

    def read(self, data: bytes, most: int) -> np.ndarray:
        """The first samples, `most` of each channel: [samples, channels] float32; whole numbers become -1 to 1."""
        count = min(self.samples, most) * self.channels
        if self.floats:
            return (
                np.frombuffer(data, f"<f{self.bits // 8}", count, self.begin)
                .astype(np.float32)
                .reshape(-1, self.channels)
            )
        width = self.bits // 8
        raw = np.frombuffer(data, np.uint8, count * width, self.begin).reshape(-1, width)
        if width == 1:  # the only ones without a sign
            whole = (raw[:, 0].astype(np.int32) - 128) << 24
        else:
            filled = np.zeros((len(raw), 4), np.uint8)  # with nothing in the lowest bytes
            filled[:, 4 - width :] = raw
            whole = filled.view("<i4")[:, 0]
        return (whole * np.float64(2.0**-31)).astype(np.float32).reshape(-1, self.channels)


def is_wav(data: bytes) -> bool:
    return _HEAD.match(data) is not None


def read_header(data: bytes) -> Wav | None:
    """What a WAV file has in it; None: samples in a form that is not plain (ADPCM, say).

    Raises RequestError where the header is damaged, or says more than there is.
    """
    form, place, long = None, 12, _OPEN_END
    for _ in range(_MOST_CHUNKS):
        if place + 8 > len(data):
            break
        name, length = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        place += 8
        if name == b"ds64" and length >= 16 and place + 16 <= len(data):  # RF64: a length of 64 bits
            long = struct.unpack_from("<Q", data, place + 8)[0]
        if name == b"data":
            length = long if length == _OPEN_END else length
            return None if form is None else _with_samples(form, data, place, length)
        if name == b"fmt ":
            form = _format(data[place : place + length])
            if form is None:
                return None
        place += length + length % 2
    unsaid = "" if form else ", and does not say their form"
    raise RequestError(f"its WAV header is damaged: it has no samples{unsaid}")


def _format(chunk: bytes) -> Wav | None:
    if len(chunk) < 16:
        raise RequestError("its WAV header is damaged: it is cut")
    number, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", chunk)
    if number == _EXTENSIBLE and len(chunk) >= 40 and chunk[26:40] == _SUBFORMAT:
        number = struct.unpack_from("<H", chunk, 24)[0]
    if number not in (_PCM, _FLOAT):
        return None
    if bits not in ((32, 64) if number == _FLOAT else (8, 16, 24, 32)):
        raise RequestError(f"its samples have {bits} bits: save it with 16")
    if not channels or frame != channels * bits // 8:
        raise RequestError(f"its WAV header is damaged: {channels} channels of {bits} bits, in {frame} bytes")
    return Wav(rate, channels, bits, number == _FLOAT, 0, 0)


def _with_samples(form: Wav, data: bytes, begin: int, length: int) -> Wav:
    there, frame = len(data) - begin, form.channels * form.bits // 8
    if length == _OPEN_END:
        length = there
    elif length > there:
        raise RequestError(
            f"its WAV header says {length:,} bytes of samples, and {there:,} are there: the file is cut, or it lies"
        )
    return Wav(form.rate, form.channels, form.bits, form.floats, begin, begin + length // frame * frame)
