"""Images made ready for the model by a few workers, so that the engine's steps do not wait for it.

A job is all the images of one request. Jobs begin in the order in which they came; while the pixels of those that are
ready and not yet encoded fill their share of the budget, no further one begins. Workers take one image at a time, and a
job that takes long lets others past: whoever sends many large images waits for them, and nobody else does (turns.py).
A video that is being decoded is left for others, and begun anew later.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from quire.config import MediaConfig
from quire.errors import NoRoomError, RequestError
from quire.multimodal.embeds import checked_features, is_embeds, layout_of_features
from quire.multimodal.images import AbandonedError, Opened, Watch, decode, open_picture, read_source, read_url
from quire.multimodal.jobs import FetchedFile, Job, PausedError, Pixels, ProcessedImage
from quire.multimodal.processor import ImageProcessor
from quire.multimodal.sources import DecodedMedia, MediaHandler, MediaSource, OpenedMedia
from quire.multimodal.turns import Turns
from quire.types import MediaKind, MediaLayout

__all__ = ["MediaPreprocessor", "Pixels", "ProcessedImage"]

_MOST_LAYOUTS = 65_536  # remembered by digest
_LOOK_SECONDS = 0.1  # from one look at who waits to the next


class MediaPreprocessor:
    """A queue of jobs, its workers, and what they have finished.

    processor: None where images are not taken. layout_of: what an image's processed inputs take in a prompt (the model
    says it). has_features: whether a digest's features
    are there already. width: size of an embedding, which given features must have. notify: called when a job is done.
    planned_layout, given_layout: as of `VisionLanguageModel`. others: how media of other kinds are prepared.
    All methods are the engine's thread's; nothing here raises for what is wrong with an image: `done` tells it.
    """

    def __init__(
        self,
        config: MediaConfig,
        processor: ImageProcessor | None,
        layout_of: Callable[[Mapping[str, torch.Tensor]], MediaLayout],
        has_features: Callable[[bytes], bool],
        width: int,
        notify: Callable[[], object] = lambda: None,
        planned_layout: Callable[[tuple[int, int], tuple[int, int]], MediaLayout | None] = lambda size, final: None,
        given_layout: Callable[[int], MediaLayout] = MediaLayout,
        others: Mapping[MediaKind, MediaHandler] = MappingProxyType({}),
    ) -> None:
        self.processor = processor
        self._config = config
        self._layout_of = layout_of
        self._has_features = has_features
        self._width = width
        self._notify = notify
        self._planned_layout = planned_layout
        self._given_layout = given_layout
        self._others = others
        self._workers: ThreadPoolExecutor | None = None  # started by the first job
        self._turns = Turns(
            config.workers or min(4, os.cpu_count() or 1),
            config.max_image_pixels,
            lambda: self.pixel_bytes > config.pixel_bytes,
            lambda: self.file_bytes + self._coming_bytes() >= self._config.most_file_bytes,
        )
        self._files: weakref.WeakSet[FetchedFile] = weakref.WeakSet()  # all that are alive
        self._busy = 0
        self._closed = False
        self._finished: list[tuple[Hashable, list[ProcessedImage] | RequestError]] = []
        self._changed = threading.Condition()
        self._shared: weakref.WeakValueDictionary[bytes, Pixels] = weakref.WeakValueDictionary()  # all that are alive
        self._layouts: dict[bytes, MediaLayout] = {}

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels that are ready and not yet let go of.

        Added up anew: what is let go of, is so in any thread and between any two operations of it.
        """
        return sum(pixels.nbytes for reference in self._shared.valuerefs() if (pixels := reference()) is not None)

    @property
    def _image_processor(self) -> ImageProcessor:
        """Raises RequestError where images are not taken, which is known before they come here."""
        if self.processor is None:
            raise RequestError("this model takes no image")
        return self.processor

    @property
    def file_bytes(self) -> int:
        """Bytes of files that were fetched and not yet let go of."""
        return sum(len(file) for file in list(self._files))

    def _coming_bytes(self) -> int:
        """What those that are being fetched may have."""
        return sum(self._config.most_bytes(job.kind) for job in self._turns.lanes["fetch"].jobs)

    @property
    def busy(self) -> bool:
        """Whether some job is at work; it will call `notify`."""
        return self._busy > 0

    def submit(
        self,
        key: Hashable,
        sources: Sequence[Any],
        settings: Mapping[str, Any],
        urgent: bool = False,
        first: int = 0,
        room: int | None = None,
        variant: bytes = b"",
    ) -> None:
        """Queue the media of one request, under a name of the caller's; together they may take `room` tokens.

        sources: images, as `load_picture` takes them, and `MediaSource`s.
        urgent: a request that holds blocks waits for it, so it goes first and needs no room. first: the place of the
        first of them among the prompt's, for messages. variant: names what else their features depend on (adapters);
        it becomes a part of their digests.
        """
        job = Job(key, sources, settings, first, room, variant, urgent)
        with self._changed:
            self._turns.add(job)
            self._begin()

    def cancel(self, key: Hashable) -> None:
        """Forget a job; if it runs, it ends as soon as it can, and what it has made is let go of at once."""
        with self._changed:
            self._turns.cancel(key)
            self._finished = [pair for pair in self._finished if pair[0] != key]

    def done(self, timeout: float = 0.0) -> list[tuple[Hashable, list[ProcessedImage] | RequestError]]:
        """What has finished since the last call, waiting up to `timeout` seconds for the first."""
        self._begin()
        with self._changed:
            if timeout and not self._finished and self._busy:
                self._changed.wait(timeout)
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Stop the workers once they are done with what they are at."""
        with self._changed:
            self._closed = True
            self._turns.close()
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Give jobs to workers while there are some. (How much room a job takes is known when it is done.)"""
        with self._changed:
            while self._start_next():
                self._busy += 1

    def _start_next(self) -> bool:
        """Give the job whose turn it is to a worker that is counted as busy; False: there is none."""
        job = None if self._closed else self._turns.next()
        if job is None:
            return False
        if self._workers is None:
            most = sum(lane.workers for lane in self._turns.lanes.values())
            self._workers = ThreadPoolExecutor(most, thread_name_prefix="quire-images")
        self._workers.submit(self._run, job)
        return True

    def _run(self, job: Job) -> None:
        """One image of a job, or to fetch it."""
        job.began = time.monotonic()
        result = self._advance(job)
        with self._changed:
            if job.at != "fetch":
                job.seconds += time.monotonic() - job.began
            waited_for = self._turns.leave(job, result is not None)
            if waited_for and result is not None:
                self._finished.append((job.key, result))
            ended = result is not None or not waited_for
            if ended:  # from here on what was made is the engine's alone
                job.images = []
                job.let_go()
            del result
            self._busy -= not self._start_next()  # never fewer, for a moment, than there are
            self._begin()
            self._changed.notify_all()
        if ended:
            self._notify()

    def _is_gone(self, job: Job) -> bool:
        """Whether nobody waits for it. Raises PausedError where others go first."""
        if job.gone:
            return True
        seconds = time.monotonic() - job.began
        if seconds >= job.slice and job.at == "media" and time.monotonic() >= job.looked + _LOOK_SECONDS:
            job.looked = time.monotonic()
            with self._changed:
                if self._turns.others_first(job, seconds):
                    raise PausedError
        return False

    def _advance(self, job: Job) -> list[ProcessedImage] | RequestError | None:
        """Prepare the next image of a job. None: there is more to do."""
        item = job.first + len(job.images)
        name = job.name(len(job.images))
        try:
            if job.at == "fetch":
                job.fetched = self._fetch(job)
                return None
            if len(job.images) < len(job.sources):
                source = job.sources[len(job.images)]
                image = source if isinstance(source, ProcessedImage) else self._prepare(source, job, item)
                if image is None:
                    return None
                job.images.append(image)
                job.fetched, job.pauses = None, 0
                self._check_room([one.layout for one in job.images], name, job.room)
            return job.images if len(job.images) == len(job.sources) else None
        except PausedError:
            job.pauses += 1
            return None
        except AbandonedError:
            return None
        except NoRoomError as error:
            return error.with_traceback(None)  # which holds all that was decoded
        except RequestError as error:
            return RequestError(str(error))  # the same, and without what it came from
        except BaseException as error:  # a fault of ours must not leave the request waiting for ever
            return RequestError(f"{name}: it cannot be prepared: {type(error).__name__}")

    def _check_room(self, layouts: Sequence[MediaLayout], name: str, room: int | None) -> None:
        """Before an image, or further ones of a prompt that cannot be served take time and memory."""
        tokens = sum(layout.tokens for layout in layouts)
        if room is not None and tokens > room:
            raise NoRoomError(name, tokens, room)

    def _prepare(self, source: Any, job: Job, item: int) -> ProcessedImage | None:
        """None where it waits until there is room to decode it. Raises RequestError, AbandonedError for a gone job."""
        source = source if job.fetched is None else job.fetched
        if isinstance(source, MediaSource):
            return self._prepare_other(source, job)
        if is_embeds(source):
            return self._given_features(source, item, job.room)
        watch = Watch(self._config.max_image_seconds, lambda: job.gone)
        if job.opened is None:
            source = read_source(source, self._config, item, lambda: job.gone)
            data = source.data if isinstance(source, FetchedFile) else source
            job.opened = source, open_picture(data, self._config, item, watch)
            job.pixels = self._planned(job, item)
        source, opened = job.opened
        assert isinstance(opened, Opened)
        with self._turn(job) as its_turn:
            return self._process(source, opened, job, item) if its_turn else None

    def _fetch(self, job: Job) -> Any:
        """What the next one's URL leads to, in the form of its source. Raises RequestError, AbandonedError."""
        source, url = job.next_source, job.url
        assert url is not None
        try:
            file = FetchedFile(read_url(url, self._config, lambda: job.gone, job.kind))
        except RequestError as error:
            raise RequestError(f"{job.name(len(job.images))}: {error}") from None
        with self._changed:
            self._files.add(file)
        return source.of(file) if isinstance(source, MediaSource) else file

    def _prepare_other(self, media: MediaSource, job: Job) -> ProcessedImage | None:
        """The same for a video or a sound."""
        handler = self._others.get(media.kind)
        if handler is None:
            raise RequestError(f"{media.name}: this model takes no {media.kind}")
        settings = job.settings.get(media.kind, {})
        if job.opened is None:
            file = media.source
            given = media.of(file.data) if isinstance(file, FetchedFile) else media
            found = handler.open(given, settings, lambda: self._is_gone(job))
            job.opened, job.pixels = (media if given is not media else found.source, found), found.pixels
        source, opened = held = job.opened
        assert isinstance(opened, OpenedMedia)
        with self._turn(job) as its_turn:
            if not its_turn:
                return None
            try:
                decoded = opened.decode()
            except PausedError:
                job.opened = held
                raise
            try:
                return self._finished_media(decoded, handler.layout, job, source, media.kind)
            except ValueError as error:
                raise RequestError(f"{media.name}: {error}") from None

    @contextmanager
    def _turn(self, job: Job) -> Iterator[bool]:
        """Whether what a job has opened can be decoded now; its memory counts until that is done."""
        lane = self._turns.lanes[job.at]
        with self._changed:
            its_turn = lane.fits(job)
            if its_turn:
                lane.decoding.append(pixels := job.pixels)
                job.opened, job.passed, job.is_decoded = None, 0, True
        try:
            yield its_turn
        finally:
            if its_turn:
                with self._changed:
                    lane.decoding.remove(pixels)
                    job.is_decoded = False

    def _planned(self, job: Job, item: int) -> int:
        """The pixels that preparing the opened image takes. Raises RequestError if it could not be served then."""
        assert job.opened is not None
        opened, settings, processor = job.opened[1], job.image_settings, self._image_processor
        assert isinstance(opened, Opened)
        height, width = opened.size
        try:
            plan = processor.plan(height, width, settings)
            layout = self._planned_layout((height, width), plan.final)
        except ValueError as error:
            named = f" (mm_processor_kwargs has {', '.join(sorted(settings))})" if settings else ""
            raise RequestError(f"image {item}: {error}{named}") from None
        if layout is not None:
            self._check_room([*(image.layout for image in job.images), layout], f"image {item}", job.room)
        return max(height * width, plan.pixels)

    def _process(self, source: Any, opened: Opened, job: Job, item: int) -> ProcessedImage:
        picture, settings, processor = decode(opened, item), job.image_settings, self._image_processor
        decoded = DecodedMedia(processor.digest(picture, settings), lambda: processor(picture, settings))
        try:
            return self._finished_media(decoded, self._layout_of, job, source, "image")
        except ValueError as error:
            raise RequestError(f"image {item}: {error}") from None

    def _finished_media(
        self,
        decoded: DecodedMedia,
        layout_of: Callable[[Mapping[str, torch.Tensor]], MediaLayout],
        job: Job,
        source: Any,
        kind: MediaKind,
    ) -> ProcessedImage:
        """Processed, unless that was done before. Raises ValueError for what does not fit the model."""
        digest = decoded.digest
        features = hashlib.sha256(digest + job.variant).digest() if job.variant else digest
        layout = self._layouts.get(digest)
        if layout is not None and self._has_features(features):
            return ProcessedImage(features, layout, None, source, kind)
        pixels = self._shared.get(digest)
        if layout is None or pixels is None:
            inputs = decoded.inputs()
            layout = layout_of(inputs)
            pixels = self._keep(digest, layout, inputs)
        return ProcessedImage(features, layout, pixels, source, kind)

    def _keep(self, digest: bytes, layout: MediaLayout, inputs: Mapping[str, torch.Tensor]) -> Pixels:
        with self._changed:
            pixels = self._shared.get(digest)  # another worker may have been at the same image
            if pixels is None:
                pixels = self._shared[digest] = Pixels(inputs)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[digest] = layout
        return pixels

    def _given_features(self, source: Any, item: int, room: int | None) -> ProcessedImage:
        """Features that the caller has computed: [tokens, width], checked as strictly as an image is."""
        tensor, grid = source["image_embeds"], source.get("image_grid_thw")
        try:
            features = checked_features(tensor, self._width, room)
            layout = layout_of_features(len(features), grid, self._given_layout, self._layout_of)
        except ValueError as error:
            raise RequestError(f"image {item}: {error}") from None
        head = repr(("image_embeds", str(features.dtype), tuple(features.shape), layout.grid)).encode()
        digest = hashlib.sha256(head + features.view(torch.uint8).numpy().tobytes()).digest()
        return ProcessedImage(digest, layout, self._keep(digest, layout, {"image_embeds": features}), source)
