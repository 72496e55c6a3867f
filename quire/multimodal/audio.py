"""Sounds on their way to a model: samples that a caller has, or a file, to what the model's tower takes.

What a sound costs is known before it is decoded: bytes by their number, seconds, channels and their rate by the header
of a WAV file or by the packets of another. Of a file no more samples are decoded than the model hears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal.audio_processor import AudioProcessor
from quire.multimodal.av_process import AUDIO_FILES, Decoder, require
from quire.multimodal.files import named, read_file_of
from quire.multimodal.resample import can_resample, resample
from quire.multimodal.sources import DecodedMedia, MediaSource, OpenedMedia
from quire.multimodal.wav import is_wav, read_header
from quire.types import MediaLayout

_RATES = (2_000, 384_000)
_MOST_CHANNELS = 8
_LOUDEST = 65_536.0  # samples are from -1 to 1; some have numbers of 16 bits as floats
_FORMS = "samples (a float array [samples] or [samples, channels]), (samples, their rate)"
_WORK = 4  # pixels' worth of work on a sample, roughly
_STARTING = 5_000_000  # the same, of starting a decoder


class AudioHandler:
    """How sounds are prepared. Any number of threads may call it at once.

    layout: what processed inputs take in a prompt (the model says it).
    """

    def __init__(
        self,
        config: MediaConfig,
        processor: AudioProcessor,
        layout: Callable[[Mapping[str, torch.Tensor]], MediaLayout],
    ) -> None:
        self._config = config
        self._processor = processor
        self.layout = layout

    def open(self, media: MediaSource, settings: Mapping[str, Any], gone: Callable[[], bool]) -> OpenedMedia:
        """Look at one, as far as to know what it costs.

        media: samples, an array or tensor of floats [samples], [samples, channels] or [channels, samples] (there are
        more samples than channels), at the model's rate or as (samples, rate); a file's bytes, its path, or a URL.
        Raises RequestError, and AbandonedError once `gone`.
        """
        with named(media):
            given, rate = _split(media.source, self._processor.rate)
            samples = _samples_of(given)
            if samples is not None:
                return self._open_samples(media, samples, rate, settings)
            if rate != self._processor.rate:
                raise RequestError("a rate comes with samples: a file has its own")
            data = read_file_of(media.of(given), self._config, gone, _FORMS)
            wav = read_header(data) if is_wav(data) else None
            if wav is None:
                return self._open_file(media.of(data), data, settings, gone)
            most = self._check(wav.samples, wav.rate, wav.channels, settings)
            return self._opened(media.of(data), lambda: wav.read(data, most).T, wav.rate, most, 0)

    def _open_samples(
        self, media: MediaSource, samples: np.ndarray, rate: int, settings: Mapping[str, Any]
    ) -> OpenedMedia:
        most = self._check(samples.shape[1], rate, samples.shape[0], settings)
        return self._opened(media, lambda: samples[:, :most].astype(np.float32), rate, most, 0)

    def _open_file(
        self, media: MediaSource, data: bytes, settings: Mapping[str, Any], gone: Callable[[], bool]
    ) -> OpenedMedia:
        require(AUDIO_FILES)
        with Decoder(data, AUDIO_FILES, self._config.max_audio_seconds, gone) as decoder:
            facts = decoder.facts()
        rate, channels = facts["rate"], facts["channels"]
        _check_form(rate, channels, self._processor.rate)
        most = self._check(round(facts["seconds"] * rate), rate, channels, settings, whole=False)

        def decoded() -> np.ndarray:
            with Decoder(data, AUDIO_FILES, self._config.max_audio_seconds, gone) as decoder:
                if decoder.facts() != facts:
                    raise RequestError("it has changed since it was looked at")
                # One more would tell that there are more than its packets say.
                decoder.ask({"samples": most + 1})
                pieces = [piece.mean(0, dtype=np.float64) for piece in decoder.samples(channels, most + 1)]
            found = np.concatenate(pieces or [np.zeros(0)])
            if len(found) > most and not settings.get("truncation"):
                raise RequestError(
                    f"it has more samples than its packets say and than this model hears ({most / rate:g} s): cut it "
                    "and save it anew, or ask for truncation"
                )
            return found[None, :most].astype(np.float32)

        return self._opened(media, decoded, rate, most, _STARTING)

    def _check(self, samples: int, rate: int, channels: int, settings: Mapping[str, Any], whole: bool = True) -> int:
        """How many samples of each channel are taken. whole: so many are there; else some more may be.

        Raises ValueError for more than may be, and for what is no sound.
        """
        _check_form(rate, channels, self._processor.rate)
        seconds = samples / rate
        if seconds > self._config.max_audio_duration:
            raise RequestError(
                f"it lasts {seconds:.0f} s, and {self._config.max_audio_duration:g} s are allowed: cut it, or raise "
                "max_audio_duration"
            )
        if samples < 1 and whole:
            raise RequestError("it has no samples")
        longest = math.ceil(self._processor.longest * rate / self._processor.rate)
        self._processor.taken(seconds, settings)
        return min(samples, longest) if whole else longest

    def _opened(
        self, media: MediaSource, decoded: Callable[[], np.ndarray], rate: int, most: int, work: int
    ) -> OpenedMedia:
        """decoded: makes [channels, samples] float32 at `rate`, `most` samples at most."""

        def prepared() -> DecodedMedia:
            with named(media):
                with np.errstate(over="ignore", invalid="ignore"):  # which are looked for
                    samples = self._heard(decoded(), rate)
                return DecodedMedia(self._processor.digest(samples), lambda: self._processor(samples))

        memory = 4 * (most + self._processor.longest)
        return OpenedMedia(media, work + _WORK * memory, memory, prepared)

    def _heard(self, channels: np.ndarray, rate: int) -> np.ndarray:
        """What the model hears: one channel, at its rate, [samples] float32. Raises RequestError."""
        if channels.shape[1] < 1:
            raise RequestError("it has no samples")
        one = channels[0] if len(channels) == 1 else channels.mean(0, dtype=np.float64).astype(np.float32)
        if not np.isfinite(one).all():
            raise RequestError("it has samples that are infinite or no numbers: they must be from -1 to 1")
        if np.abs(one).max() > _LOUDEST:
            raise RequestError(f"it has samples above {_LOUDEST:,.0f}: they must be from -1 to 1, so divide them")
        # Zeros have no sign: some files have one, and what they sound like is one sound.
        return resample(one + np.float32(0.0), rate, self._processor.rate)[: self._processor.longest]


def _check_form(rate: int, channels: int, wanted: int) -> None:
    """Raises RequestError for rates and numbers of channels that are not taken. wanted: the model's rate."""
    if not _RATES[0] <= rate <= _RATES[1]:
        raise RequestError(
            f"it has {rate:,} samples a second, and {_RATES[0]:,} to {_RATES[1]:,} are taken: save it with {wanted:,}"
        )
    if not can_resample(rate, wanted):
        raise RequestError(
            f"it has {rate:,} samples a second, which share no divisor with the model's {wanted:,}: save it with these"
        )
    if not 1 <= channels <= _MOST_CHANNELS:
        raise RequestError(f"it has {channels} channels, and 1 to {_MOST_CHANNELS} are taken: save it with one")


def _split(source: Any, rate: int) -> tuple[Any, int]:
    """(samples or file, rate), of vLLM's (samples, rate) too. rate: where none is said. Raises RequestError."""
    if not isinstance(source, tuple):
        return source, rate
    if len(source) != 2:
        raise RequestError(f"a pair must be (samples, their rate), not {len(source)} things")
    said = source[1]
    whole = isinstance(said, (int, float, np.integer, np.floating)) and not isinstance(said, bool)
    if not whole or not math.isfinite(said) or said != int(said):
        raise RequestError(
            f"(samples, rate): the rate must be a whole number of samples a second, not {repr(said)[:40]}"
        )
    return source[0], int(said)


def _samples_of(given: Any) -> np.ndarray | None:
    """[channels, samples], of floats; None: no samples were given. Raises RequestError."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float().numpy() if given.is_floating_point() else given.numpy()
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview)):
        try:
            given = np.asarray(given, dtype=np.float32)
        except (TypeError, ValueError):
            raise RequestError(f"expected {_FORMS}, bytes, a path or a URL, got a {type(given).__name__}") from None
    if not isinstance(given, np.ndarray):
        return None
    if given.dtype.kind != "f":
        raise RequestError(
            f"samples must be floats from -1 to 1, not {given.dtype}: divide them by the largest (32768 for int16)"
        )
    if given.ndim not in (1, 2):
        raise RequestError(
            f"samples must be [samples], [samples, channels] or [channels, samples], not {list(given.shape)}"
        )
    if given.ndim == 1:
        return given[None]
    if given.shape[0] == given.shape[1]:
        raise RequestError(f"samples of shape {list(given.shape)}: which side are the channels? Give [samples]")
    return given if given.shape[0] < given.shape[1] else given.T
