"""Images made ready for the model by a few workers, so that the engine's steps do not wait for it.

A job is all the images of one request. Jobs begin in the order in which they came; while the pixels of those that are
ready and not yet encoded fill their share of the budget, no further one begins.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from quire.config import MediaConfig
from quire.contracts import ImageLayout
from quire.errors import RequestError
from quire.multimodal.images import load_picture, read_source
from quire.multimodal.processor import ImageProcessor

_LAYOUTS = 65_536  # remembered by digest


class NoRoomError(RequestError):
    """A prompt's images take more tokens, up to image number `item`, than there is room for."""

    def __init__(self, item: int, tokens: int, room: int) -> None:
        super().__init__(
            f"image {item}: the prompt's images take {tokens} tokens up to this one, and max_model_len leaves room "
            f"for {room}: use fewer or smaller ones"
        )
        self.tokens = tokens
        self.room = room


class Pixels:
    """What a model's tower takes of one image; counted for as long as anybody has it."""

    __slots__ = ("__weakref__", "inputs", "nbytes")

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.inputs = inputs
        self.nbytes = sum(tensor.nbytes for tensor in inputs.values())


@dataclass(frozen=True, slots=True)
class Prepared:
    """One image, ready.

    digest: of its features: equal digests, equal features. pixels: None where the model's features of it are there
    already. source: from which it can be prepared again.
    """

    digest: bytes
    layout: ImageLayout
    pixels: Pixels | None
    source: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    key: Hashable
    sources: Sequence[Any]
    settings: Mapping[str, Any]
    first: int
    room: int | None
    variant: bytes


class Preparer:
    """A queue of jobs, its workers, and what they have finished.

    layout_of: what processed inputs take in a prompt (the model says it). has_features: whether a digest's features
    are there already. width: size of an embedding, which given features must have. ring: called when a job is
    done.
    All methods are the engine's thread's; nothing here raises for what is wrong with an image: `done` tells it.
    """

    def __init__(
        self,
        config: MediaConfig,
        processor: ImageProcessor,
        layout_of: Callable[[Mapping[str, torch.Tensor]], ImageLayout],
        has_features: Callable[[bytes], bool],
        width: int,
        ring: Callable[[], object] = lambda: None,
    ) -> None:
        self.processor = processor
        self._config = config
        self._layout_of = layout_of
        self._has_features = has_features
        self._width = width
        self._ring = ring
        self._workers_count = config.workers or min(4, os.cpu_count() or 1)
        self._workers: ThreadPoolExecutor | None = None  # started by the first job
        self._queue: deque[_Job] = deque()
        self._urgent: deque[_Job] = deque()
        self._busy = 0
        self._running: list[_Job] = []  # those whose results somebody waits for
        self._finished: list[tuple[Hashable, list[Prepared] | RequestError]] = []
        self._changed = threading.Condition()
        self._shared: weakref.WeakValueDictionary[bytes, Pixels] = weakref.WeakValueDictionary()  # all that are alive
        self._layouts: dict[bytes, ImageLayout] = {}

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels that are ready and not yet let go of.

        Added up anew: what is let go of, is so in any thread and between any two operations of it.
        """
        return sum(pixels.nbytes for reference in self._shared.valuerefs() if (pixels := reference()) is not None)

    @property
    def busy(self) -> bool:
        """Whether some job is at work; it will ring."""
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
        """Queue the images of one request, under a name of the caller's; together they may take `room` tokens.

        urgent: a request that holds blocks waits for it, so it goes first and needs no room. first: the place of the
        first of them among the prompt's, for messages. variant: names what else their features depend on (adapters);
        it becomes a part of their digests.
        """
        with self._changed:
            (self._urgent if urgent else self._queue).append(_Job(key, sources, settings, first, room, variant))
            self._begin()

    def cancel(self, key: Hashable) -> None:
        """Forget a job; if it runs, its result will be let go of at once."""
        with self._changed:
            self._queue = deque(job for job in self._queue if job.key != key)
            self._urgent = deque(job for job in self._urgent if job.key != key)
            self._running = [job for job in self._running if job.key != key]
            self._finished = [pair for pair in self._finished if pair[0] != key]

    def done(self, timeout: float = 0.0) -> list[tuple[Hashable, list[Prepared] | RequestError]]:
        """What has finished since the last call, waiting up to `timeout` seconds for the first."""
        self._begin()
        with self._changed:
            if timeout and not self._finished and self._busy:
                self._changed.wait(timeout)
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Stop the workers once they are done with what they are at."""
        self._queue.clear()
        self._urgent.clear()
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        """Start jobs while there are workers and room. (How much room a job takes is known when it is done.)"""
        with self._changed:
            while self._busy < self._workers_count:
                queue = self._urgent or self._queue
                if not queue or (queue is self._queue and self.pixel_bytes > self._config.pixel_bytes):
                    break
                self._busy += 1
                if self._workers is None:
                    self._workers = ThreadPoolExecutor(self._workers_count, thread_name_prefix="quire-images")
                self._running.append(queue[0])
                self._workers.submit(self._run, queue.popleft())

    def _run(self, job: _Job) -> None:
        result = self._result(job)
        with self._changed:
            self._busy -= 1
            if job in self._running:
                self._running.remove(job)
                self._finished.append((job.key, result))
            del result  # from here on it is the engine's alone
            self._changed.notify_all()
            self._begin()
        self._ring()

    def _result(self, job: _Job) -> list[Prepared] | RequestError:
        item, images = job.first, list[Prepared]()
        try:
            for item, source in enumerate(job.sources, job.first):
                images.append(self._prepare(source, job, item))
                self._check_room(images, item, job.room)
        except NoRoomError as error:
            return error.with_traceback(None)  # which holds all that was decoded
        except RequestError as error:
            return RequestError(str(error))  # the same, and without what it came from
        except BaseException as error:  # a fault of ours must not leave the request waiting for ever
            return RequestError(f"image {item}: it cannot be prepared: {type(error).__name__}")
        return images

    def _check_room(self, images: Sequence[Prepared], item: int, room: int | None) -> None:
        """Before further images of a prompt that cannot be served take time and memory."""
        tokens = sum(image.layout.tokens for image in images)
        if room is not None and tokens > room:
            raise NoRoomError(item, tokens, room)

    def _prepare(self, source: Any, job: _Job, item: int) -> Prepared:
        if is_embeds(source):
            return self._given_features(source, item, job.room)
        settings = job.settings
        source = read_source(source, self._config, item)
        picture = load_picture(source, self._config, item)
        digest = self.processor.digest(picture, settings)
        features = hashlib.sha256(digest + job.variant).digest() if job.variant else digest
        layout = self._layouts.get(digest)
        if layout is not None and self._has_features(features):
            return Prepared(features, layout, None, source)
        pixels = self._shared.get(digest)
        if layout is None or pixels is None:
            try:
                inputs = self.processor(picture, settings)
                layout = self._layout_of(inputs)
            except ValueError as error:
                raise RequestError(f"image {item}: {error}") from None
            pixels = self._keep(digest, layout, inputs)
        return Prepared(features, layout, pixels, source)

    def _keep(self, digest: bytes, layout: ImageLayout, inputs: Mapping[str, torch.Tensor]) -> Pixels:
        with self._changed:
            pixels = self._shared.get(digest)  # another worker may have been at the same image
            if pixels is None:
                pixels = self._shared[digest] = Pixels(inputs)
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[digest] = layout
        return pixels

    def _given_features(self, source: Any, item: int, room: int | None) -> Prepared:
        """Features that the caller has computed: [tokens, width], checked as strictly as an image is."""
        tensor, grid = source["image_embeds"], source.get("image_grid_thw")
        try:
            features = _checked_features(tensor, self._width, room)
            layout = self._layout_of_features(features, grid)
        except ValueError as error:
            raise RequestError(f"image {item}: {error}") from None
        head = repr(("image_embeds", str(features.dtype), tuple(features.shape), layout.grid)).encode()
        digest = hashlib.sha256(head + features.view(torch.uint8).numpy().tobytes()).digest()
        return Prepared(digest, layout, self._keep(digest, layout, {"image_embeds": features}), source)

    def _layout_of_features(self, features: torch.Tensor, grid: Any) -> ImageLayout:
        if grid is None:
            return ImageLayout(len(features))
        table = torch.as_tensor(grid)
        if table.numel() != 3 or table.is_floating_point():
            raise ValueError(f"image_grid_thw={grid}: must be three whole numbers")
        try:
            layout = self._layout_of({"image_grid_thw": table.reshape(1, 3)})
        except KeyError:
            raise ValueError("this model's image_embeds take no image_grid_thw") from None
        if layout.tokens != len(features):
            raise ValueError(
                f"image_grid_thw={grid} asks for {layout.tokens} rows of image_embeds, not {len(features)}"
            )
        return layout


def is_embeds(source: Any) -> bool:
    """Whether an image is given as features: {"image_embeds": tensor, "image_grid_thw": ...}."""
    return isinstance(source, Mapping) and "image_embeds" in source


def _checked_features(tensor: Any, width: int, room: int | None) -> torch.Tensor:
    wanted = f"image_embeds must be a dense float tensor [tokens, {width}]"
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.is_floating_point():
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{wanted}, not {kind}")
    if tensor.dim() != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise ValueError(f"{wanted}, not {list(tensor.shape)}")
    if room is not None and len(tensor) > room:
        raise ValueError(f"image_embeds has {len(tensor)} rows, and max_model_len leaves room for {room}")
    features = tensor.detach().to("cpu", copy=True).contiguous()
    if not bool(features.isfinite().all()):
        raise ValueError("image_embeds has values that are infinite or no numbers")
    return features
