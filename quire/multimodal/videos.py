"""Videos on their way to a model: frames that a caller has, or a file, to what the model's tower takes.

What a video costs is known before it is decoded: bytes by their number, frames by counting packets, pixels by the
processor's rules. Of a file only the frames that a model is shown are handed out by its decoder, one after the other,
and each is made as small as the model sees it before the next one comes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal.av_process import VIDEO_FILES, Decoder, require
from quire.multimodal.files import named, read_file_of
from quire.multimodal.images import Watch, decode, open_picture
from quire.multimodal.sources import DecodedMedia, MediaSource, OpenedMedia
from quire.multimodal.video_processor import VideoPlan, VideoProcessor
from quire.multimodal.video_sampling import Clip
from quire.types import MediaLayout

_FLOATS = 4  # times the memory of a pixel that processing takes, which makes floats of them
_FORMS = "frames (a list of images, or an array [frames, height, width, 3])"
_METADATA = {"fps", "duration", "total_num_frames", "frames_indices", "video_backend", "do_sample_frames", "height",
             "width"}  # fmt: skip


class VideoHandler:
    """How videos are prepared. Any number of threads may call it at once.

    layout: what processed inputs take in a prompt (the model says it).
    """

    def __init__(
        self,
        config: MediaConfig,
        processor: VideoProcessor,
        layout: Callable[[Mapping[str, torch.Tensor]], MediaLayout],
    ) -> None:
        self._config = config
        self._processor = processor
        self.layout = layout

    def open(self, media: MediaSource, settings: Mapping[str, Any], gone: Callable[[], bool]) -> OpenedMedia:
        """Look at one, as far as to know what it costs.

        media: frames (a list of images, an array or tensor [T, H, W, 3]), or these and a dict of metadata; a file's
        bytes, its path, or a URL. Raises RequestError, and AbandonedError once `gone`.
        """
        with named(media):
            given, metadata = _split(media.source)
            frames = _frames_of(given)
            if frames is not None:
                return self._open_frames(media, frames, metadata, settings, gone)
            if metadata:
                raise RequestError("metadata come with frames: a file has its own")
            require(VIDEO_FILES)
            data = read_file_of(media.of(given), self._config, gone, _FORMS)
            return self._open_file(media.of(data), data, settings, gone)

    def _open_frames(
        self,
        media: MediaSource,
        frames: Sequence[Any],
        metadata: Mapping[str, Any],
        settings: Mapping[str, Any],
        gone: Callable[[], bool],
    ) -> OpenedMedia:
        clip, indices = _clip_of(len(frames), metadata)
        # Rates are known, so that the checkpoint's own rule can choose; else frames are taken as they are.
        as_given = clip.rate is None or indices is not None or metadata.get("do_sample_frames") is False
        chosen = self._processor.choose(Clip(len(frames), clip.rate, clip.duration), settings, as_given)
        watch = Watch(self._config.max_video_seconds, gone)
        height, width = open_picture(frames[chosen[0]], self._config, 0, watch).size
        plan = self._processor.plan(len(chosen), height, width, settings)
        places = chosen if indices is None else [indices[place] for place in chosen]

        def each() -> Iterator[torch.Tensor]:
            watch.restart()
            for number, place in enumerate(chosen):
                image = decode(open_picture(frames[place], self._config, number, watch), number).image
                yield _as_tensor(image)

        return self._opened(media, each, plan, (height, width), len(chosen), (clip, places), settings)

    def _open_file(
        self, media: MediaSource, data: bytes, settings: Mapping[str, Any], gone: Callable[[], bool]
    ) -> OpenedMedia:
        with Decoder(data, VIDEO_FILES, self._config.max_video_seconds, gone) as decoder:
            facts = decoder.facts()
        height, width = facts["height"], facts["width"]
        if height < 1 or width < 1 or height * width > self._config.max_image_pixels:
            raise RequestError(
                f"its frames have {width} x {height} pixels, and {self._config.max_image_pixels:,} in all are allowed: "
                "scale it down, or raise max_image_pixels"
            )
        rate = facts["rate"] or None
        clip = Clip(facts["frames"], rate, facts["frames"] / rate if rate else None)
        if clip.seconds is not None and clip.seconds > self._config.max_video_duration:
            raise RequestError(
                f"it lasts {clip.seconds:.0f} s, and {self._config.max_video_duration:g} s are allowed: cut it, or "
                "raise max_video_duration"
            )
        chosen = self._processor.choose(clip, settings, as_given=False)
        # A turned one has its sides the other way round: what it costs is the same, but for roundings.
        plan = self._processor.plan(len(chosen), height, width, settings)

        def each() -> Iterator[torch.Tensor]:
            with Decoder(data, VIDEO_FILES, self._config.max_video_seconds, gone) as decoder:
                if decoder.facts() != facts:
                    raise RequestError("it has changed since it was looked at")
                decoder.ask({"places": chosen, "pixels": self._config.max_image_pixels})
                for columns, rows, turned, pixels in decoder.frames(self._config.max_image_pixels):
                    array = np.rot90(pixels.reshape(rows, columns, 3), turned)
                    yield torch.from_numpy(np.ascontiguousarray(array)).permute(2, 0, 1)

        work = min(clip.frames, 16 * len(chosen))
        return self._opened(media, each, plan, (height, width), work, (clip, chosen), settings)

    def _opened(
        self,
        media: MediaSource,
        each: Callable[[], Iterator[torch.Tensor]],
        plan: VideoPlan,
        size: tuple[int, int],
        work: int,
        shown: tuple[Clip, Sequence[int]],
        settings: Mapping[str, Any],
    ) -> OpenedMedia:
        def decoded() -> DecodedMedia:
            with named(media):
                return self._decoded(each, plan.frames, shown, settings)

        area = size[0] * size[1]
        return OpenedMedia(media, work * area, area + _FLOATS * plan.pixels, decoded)

    def _decoded(
        self,
        each: Callable[[], Iterator[torch.Tensor]],
        most: int,
        shown: tuple[Clip, Sequence[int]],
        settings: Mapping[str, Any],
    ) -> DecodedMedia:
        """Frames as small as the model sees them, and a digest of what they were.

        most: frames; a decoder that sends more is at fault.
        """
        digest, resized = hashlib.sha256(), list[torch.Tensor]()
        size, plan = None, None
        for frame in each():
            if plan is None:
                size = tuple(frame.shape)
                plan = self._processor.plan(len(shown[1]), size[1], size[2], settings)
            if tuple(frame.shape) != size:
                raise RequestError("its frames are not all of one size: make them so")
            if len(resized) >= max(most, len(shown[1])):
                raise RequestError("its decoder sends more frames than it was asked for")
            digest.update(struct.pack("<II", *frame.shape[1:]))
            digest.update(frame.permute(1, 2, 0).contiguous().numpy().reshape(-1).data)
            resized.append(self._processor.resized(frame.contiguous(), plan, settings))
        if len(resized) != len(shown[1]):
            raise RequestError(f"it has {len(resized)} of the {len(shown[1])} frames that are wanted: it is damaged")
        times = self._processor.times(*shown)
        key = self._processor.digest(digest.digest(), torch.cat(list(times.values())), settings)
        return DecodedMedia(key, lambda: {**self._processor.finish(resized, settings), **times})


def _split(source: Any) -> tuple[Any, Mapping[str, Any]]:
    """(frames or file, metadata), of vLLM's (frames, metadata) too."""
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        metadata = {name: value for name, value in source[1].items() if value is not None}
        unknown = set(metadata) - _METADATA
        if unknown:
            raise RequestError(f"metadata has {sorted(map(str, unknown))}; it takes {', '.join(sorted(_METADATA))}")
        return source[0], metadata
    return source, {}


def _frames_of(given: Any) -> Sequence[Any] | None:
    """Frames, each of them an image as `open_picture` takes it; None: it is no list of frames. Raises RequestError."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    if isinstance(given, np.ndarray):
        if given.ndim != 4 or given.dtype != np.uint8:
            raise RequestError(
                f"an array must be uint8 of shape [frames, height, width, 3], got {given.dtype} {list(given.shape)}"
            )
        given = given.transpose(0, 2, 3, 1) if given.shape[1] == 3 and given.shape[3] not in (1, 3, 4) else given
        given = list(given)
    if not isinstance(given, (list, tuple)):
        return None
    if not given:
        raise RequestError("it has no frames")
    return [_as_image(frame) for frame in given]


def _as_image(frame: Any) -> Any:
    if isinstance(frame, torch.Tensor):
        frame = frame.detach().cpu().numpy()
    if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[0] == 3 and frame.shape[2] not in (1, 3, 4):
        frame = frame.transpose(1, 2, 0)
    if not isinstance(frame, (np.ndarray, Image.Image)):
        raise RequestError(f"a frame must be a PIL image or an array, not {type(frame).__name__}")
    return frame


def _clip_of(count: int, metadata: Mapping[str, Any]) -> tuple[Clip, list[int] | None]:
    """What metadata say of so many frames, and which ones of a longer video they are. Raises RequestError."""
    for name in ("fps", "duration"):
        value = metadata.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf
        ):
            raise RequestError(f"metadata: {name}={value!r} must be a number above 0")
    total, indices = metadata.get("total_num_frames", count), metadata.get("frames_indices")
    if type(total) is not int or total < count:
        raise RequestError(f"metadata: total_num_frames={total!r} must be a number of frames, {count} at least")
    if indices is not None:
        indices = [int(place) for place in indices]
        if len(indices) != count or indices != sorted(indices) or not 0 <= indices[0] <= indices[-1] < total:
            raise RequestError(f"metadata: frames_indices must be {count} ascending numbers below {total}")
    elif total != count:
        raise RequestError(f"metadata: total_num_frames={total}, and {count} are given: say which, by frames_indices")
    return Clip(total, metadata.get("fps"), metadata.get("duration")), indices


def _as_tensor(image: Image.Image) -> torch.Tensor:
    """[3, H, W] uint8"""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
