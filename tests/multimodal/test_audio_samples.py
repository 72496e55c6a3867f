"""What becomes of samples and files of sound before a model hears them: WAV, rates, channels."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal import AudioHandler, MediaSource
from quire.multimodal.resample import can_resample, resample
from quire.multimodal.wav import read_header
from quire.types import MediaLayout
from tests.multimodal.tiny_audio import encoded, sound, wav

RATE = 16_000


class Heard:
    """In the place of a processor: what would be heard, two seconds at most."""

    rate, longest = RATE, 2 * RATE

    def taken(self, seconds: float, settings: Mapping[str, Any]) -> float:
        if seconds > 2 + 1e-4 and not settings.get("truncation"):
            raise ValueError(f"it lasts {seconds:.2f} s, and this model hears 2 s")
        return min(seconds, 2.0)

    def digest(self, samples: np.ndarray) -> bytes:
        return samples.tobytes()

    def __call__(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        return {"samples": torch.from_numpy(samples)}


HANDLER = AudioHandler(MediaConfig(), Heard(), lambda inputs: MediaLayout(1))  # type: ignore[arg-type]


def heard(given: Any, **settings: Any) -> np.ndarray:
    return HANDLER.open(MediaSource("audio", given), settings, lambda: False).decode().inputs()["samples"].numpy()


def tone(hertz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000])
def test_tones_keep_their_pitch_and_what_is_too_high_is_gone(rate: int) -> None:
    for hertz in (100, 440, 3_000):
        made = resample(tone(hertz, rate), rate, RATE)
        assert made.dtype == np.float32 and len(made) == -(-round(rate * 0.5) * RATE // rate)
        middle = slice(600, -600)
        assert np.abs(made - tone(hertz, RATE)[: len(made)])[middle].max() < 1e-3
    if rate > 20_000:
        assert np.abs(resample(tone(9_000, rate), rate, RATE)[600:-600]).max() < 1e-3
    flat = resample(np.full(rate // 2, 0.25, np.float32), rate, RATE)
    assert np.abs(flat[600:-600] - 0.25).max() < 1e-5


def test_what_comes_later_does_not_change_what_was_before() -> None:
    samples = sound(1, 1.0, 44_100)
    whole, part = resample(samples, 44_100, RATE), resample(samples[:20_000], 44_100, RATE)
    assert np.array_equal(whole[:7000], part[:7000])
    assert resample(samples, RATE, RATE) is samples
    assert not can_resample(191_999, RATE) and can_resample(192_000, RATE) and can_resample(22_254, RATE)


@pytest.mark.parametrize(
    ("bits", "floats", "step"),
    [(8, False, 2**-7), (16, False, 2**-15), (24, False, 2**-23), (32, False, 2**-24), (32, True, 0), (64, True, 0)],
)
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_wav_in_all_its_widths(bits: int, floats: bool, step: float, channels: int) -> None:
    samples = np.stack([sound(number, 0.2) for number in range(channels)], 1)
    header = read_header(wav(samples, RATE, bits, floats))
    assert header is not None and (header.samples, header.channels) == (len(samples), channels)
    found = header.read(wav(samples, RATE, bits, floats), 10_000)
    assert found.shape == samples.shape and np.abs(found - samples).max() <= step
    mixed = samples[:, 0] if channels == 1 else samples.mean(1, dtype=np.float64)
    assert np.abs(heard(wav(samples, RATE, bits, floats)) - mixed).max() <= step + 1e-7


def test_wav_with_other_chunks_and_an_extensible_form() -> None:
    plain = wav(sound(1, 0.1), RATE, 16, False)
    form, data = plain[20:36], plain[44:]
    more = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    longer = struct.pack("<H", 0xFFFE) + form[2:] + struct.pack("<HHIH", 22, 16, 4, 1)
    longer += bytes.fromhex("000000001000800000aa00389b71")
    for chunk in (form, longer):
        body = b"WAVE" + more + b"fmt " + struct.pack("<I", len(chunk)) + chunk + more
        for length, behind in ((len(data), b"junk"), (0xFFFFFFFF, b"")):
            file = b"RIFF" + struct.pack("<I", 0) + body + b"data" + struct.pack("<I", length) + data + behind
            assert np.array_equal(heard(file), heard(plain))
    assert read_header(plain[:20] + struct.pack("<H", 2) + plain[22:]) is None  # ADPCM is for another decoder


def test_wav_with_a_length_of_64_bits() -> None:
    """RF64 (EBU Tech 3306): what is behind the samples is no sound."""
    plain = wav(sound(1, 0.1), RATE, 16, False)
    form, data = plain[12:36], plain[44:]
    for said, behind in ((len(data), b"LIST" + struct.pack("<I", 400) + bytes(400)), (len(data), b"")):
        sizes = b"ds64" + struct.pack("<IQQQI", 28, 0, said, 0, 0)
        file = b"RF64" + struct.pack("<I", 0xFFFFFFFF) + b"WAVE" + sizes + form
        file += b"data" + struct.pack("<I", 0xFFFFFFFF) + data + behind
        assert np.array_equal(heard(file), heard(plain))
    with pytest.raises(RequestError, match="the file is cut, or it lies"):
        heard(file[:-100])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (lambda plain: plain[:30], "WAV header is damaged: it is cut"),
        (lambda plain: plain[:12] + b"fmt " + struct.pack("<I", 4) + bytes(4), "WAV header is damaged: it is cut"),
        (lambda plain: plain[:-10], "it is cut|the file is cut, or it lies"),
        (lambda plain: plain[:40] + struct.pack("<I", 2**31) + plain[44:], "says 2,147,483,648 bytes of samples"),
        (lambda plain: plain[:40] + struct.pack("<I", 0) + plain[44:], "it has no samples"),
        (lambda plain: plain[:22] + struct.pack("<H", 0) + plain[24:], "0 channels of 16 bits"),
        (lambda plain: plain[:34] + struct.pack("<H", 17) + plain[36:], "its samples have 17 bits"),
        (lambda plain: plain[:24] + struct.pack("<I", 0) + plain[28:], "it has 0 samples a second"),
        (lambda plain: plain[:24] + struct.pack("<I", 2**32 - 1) + plain[28:], "4,294,967,295 samples a second"),
        (
            lambda plain: plain[:24] + struct.pack("<I", 191_999) + plain[28:],
            "share no divisor with the model's 16,000",
        ),
        (lambda plain: plain[:24] + struct.pack("<I", 2_000) + plain[28:], "this model hears 2 s"),
        (lambda plain: plain[:36], "WAV header is damaged: it has no samples$"),
        (lambda plain: plain[:12], "it has no samples, and does not say their form"),
        (lambda plain: plain[:12] + b"junk" * 2000, "WAV header is damaged"),
        (lambda plain: b"", "it has no bytes"),
    ],
)
def test_damaged_and_lying_wav(file: Any, message: str) -> None:
    plain = wav(sound(1, 0.5), RATE, 16, False)
    with pytest.raises(RequestError, match=f"^audio 0: .*({message})"):
        heard(file(plain))


def test_every_form_of_samples() -> None:
    samples = sound(1, 0.5)
    stereo = np.stack([samples, samples[::-1]], 1)
    assert np.array_equal(heard(samples), samples)
    tensor = torch.from_numpy(samples)
    pairs = [(samples, RATE), (samples, 16_000.0), (tensor, np.int64(RATE))]
    for given in (samples.tolist(), samples.astype(np.float64), tensor, *pairs, samples[None], samples[:, None]):
        assert np.array_equal(heard(given), samples)
    assert np.array_equal(heard(stereo), heard(stereo.T)) and np.abs(heard(stereo) - stereo.mean(1)).max() < 1e-7
    assert np.array_equal(heard((samples, 8_000)), resample(samples, 8_000, RATE))
    assert np.array_equal(heard(sound(2, 3.0), truncation=True), sound(2, 3.0)[: 2 * RATE])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(100, np.int16), "samples must be floats from -1 to 1, not int16: divide them"),
        (torch.zeros(100, dtype=torch.int16), "not int16"),
        (np.zeros(0, np.float32), "it has no samples"),
        (np.zeros((0, 2), np.float32), "it has no samples|0 channels"),
        (np.full(100, np.nan, np.float32), "infinite or no numbers"),
        (np.array([0.0, np.inf] * 500, np.float32), "infinite or no numbers"),
        (np.array([0.0, np.inf, -np.inf] * 500, np.float32).reshape(-1, 3), "infinite or no numbers"),
        (np.full(900, 1e20, np.float32), "samples above 65,536"),
        (np.full(900, 1e300), "infinite or no numbers"),
        (np.zeros((900, 9), np.float32), "it has 9 channels, and 1 to 8 are taken"),
        (np.zeros((4, 4), np.float32), "which side are the channels"),
        (np.zeros((2, 2, 900), np.float32), r"\[samples\], \[samples, channels\]"),
        (np.zeros(3 * RATE, np.float32), "it lasts 3.00 s, and this model hears 2 s"),
        (np.zeros(900, np.bool_), "must be floats"),
        ((np.zeros(900, np.float32), 0), "it has 0 samples a second"),
        ((np.zeros(900, np.float32), -16_000), "samples a second"),
        ((np.zeros(900, np.float32), 1e9), "1,000,000,000 samples a second"),
        ((np.zeros(900, np.float32), 16_000.5), "a whole number of samples a second, not 16000.5"),
        ((np.zeros(900, np.float32), float("nan")), "a whole number of samples"),
        ((np.zeros(900, np.float32), "16000"), "a whole number of samples"),
        ((np.zeros(900, np.float32), RATE, 1), "a pair must be"),
        ((b"RIFF", 8_000), "a rate comes with samples"),
        (["a", "b"], "expected samples"),
        ([[0.0], [0.0, 1.0]], "expected samples"),
        (3, "expected samples .* got int"),
        (None, "expected samples .* got NoneType"),
        ({"array": [0.0]}, "got dict"),
        (b"no sound at all", "no audio in one of the containers WAV, FLAC"),
        ("data:image/png;base64,AAAA", "must look like data:audio/wav;base64"),
        ("data:audio/wav;base64,A!", "valid base64"),
        ("file:///etc/passwd", "file: URLs are off"),
        ("http://127.0.0.1/a.wav", "http: and https: URLs are off"),
    ],
)  # fmt: skip
def test_samples_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^audio 0: .*({message})"):
        heard(given)


@pytest.mark.parametrize(
    ("form", "codec", "rate", "error"),
    [
        ("flac", "flac", 22_050, 1e-3), ("ogg", "libopus", 48_000, 0.1), ("mp3", "libmp3lame", 44_100, 0.1),
        ("mp4", "aac", 44_100, 0.1), ("webm", "libopus", 48_000, 0.1), ("aiff", "pcm_s16be", 8_000, 1e-3),
        ("wav", "pcm_mulaw", 8_000, 0.05),
    ],
)  # fmt: skip
def test_other_files(form: str, codec: str, rate: int, error: float) -> None:
    pytest.importorskip("av")
    samples = tone(440, rate, 1.0)
    found = heard(encoded(samples, form, codec, rate))
    assert abs(len(found) - RATE) < 0.1 * RATE
    assert np.abs(found[1000:14_000] - tone(440, RATE, 1.0)[1000:14_000]).max() < error


def test_flac_is_what_it_was_made_of() -> None:
    pytest.importorskip("av")
    samples = np.round(sound(1, 0.5) * 32_768).astype(np.float32) / 32_768
    assert np.array_equal(heard(encoded(samples)), samples)
    assert np.array_equal(heard(encoded(sound(1, 5.0)), truncation=True)[:900], heard(encoded(sound(1, 1.0)))[:900])
