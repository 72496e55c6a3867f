"""Images on their way into the engine."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.errors import ContextLengthError, RequestError
from quire.multimodal import MediaPreprocessor, NoRoomError, ProcessedImage
from quire.platform.engine.core import EngineCore
from quire.platform.inputs.prepared import PreparedRequest
from quire.platform.inputs.processor import InputProcessor
from quire.platform.kv.prefix_index import feature_variant
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.request import MediaInput, Request

logger = logging.getLogger("quire")


@dataclass(frozen=True, eq=False)
class ReprocessJob:
    """An image that is prepared once more, as its features were evicted before the request was done with them."""

    request: Request
    media: MediaInput


class MediaArrivals:
    """Requests whose images are being prepared by workers, and images that are prepared once more.

    preprocessor: None for a model that takes no images. start: queues a request whose images are ready.
    waiting: the requests, by id. It belongs to the thread that steps.
    """

    def __init__(
        self,
        preprocessor: MediaPreprocessor | None,
        inputs: InputProcessor,
        core: EngineCore,
        start: Callable[[PreparedRequest, Sequence[ProcessedImage]], None],
    ) -> None:
        self.preprocessor = preprocessor
        self.waiting: dict[str, PreparedRequest] = {}
        self._inputs = inputs
        self._core = core
        self._start = start

    @property
    def is_busy(self) -> bool:
        """Whether workers have something to do."""
        return self.preprocessor is not None and bool(self.preprocessor.busy)

    def add(self, prepared: PreparedRequest) -> None:
        """Have a request's images prepared; `take_ready` queues it."""
        assert self.preprocessor is not None
        prompt = prepared.prompt
        room, variant = self._inputs.room(prompt), feature_variant(prompt.adapters, prompt.salt)
        self.preprocessor.submit(prepared, prompt.images, prompt.settings, room=room, variant=variant)
        self.waiting[prepared.request_id] = prepared

    def cancel(self, request_id: str) -> None:
        """Forget a request that waits for its images, if there is one of this id."""
        prepared = self.waiting.pop(request_id, None)
        if prepared is not None and self.preprocessor is not None:
            self.preprocessor.cancel(prepared)
            prepared.discard()

    def reprocess(self, images: Iterable[tuple[Request, MediaInput]]) -> None:
        """Have images prepared once more, before those of new requests."""
        for request, media in images:
            assert self.preprocessor is not None
            self.preprocessor.submit(
                ReprocessJob(request, media),
                [media.source],
                media.settings,
                urgent=True,
                first=request.media.index(media),
                variant=feature_variant(request.adapters, request.salt),
            )

    def take_ready(self) -> None:
        """Take what the workers have finished: queue requests, hand back the pixels of images."""
        if self.preprocessor is None:
            return
        for job, result in self.preprocessor.done():
            if isinstance(job, ReprocessJob):
                self._take_reprocessed(job, result)
            elif isinstance(job, PreparedRequest) and self.waiting.get(job.request_id) is job:
                del self.waiting[job.request_id]
                self._admit(job, result)

    def _admit(self, prepared: PreparedRequest, images: list[ProcessedImage] | RequestError) -> None:
        request_id = prepared.request_id
        try:
            if isinstance(images, NoRoomError):
                limit = self._inputs.limits.max_model_len
                raise ContextLengthError(
                    limit, limit - images.room + images.tokens, request_id=request_id, at_least=True, hint=f": {images}"
                )
            if isinstance(images, RequestError):
                raise RequestError(f"request {request_id}: {images}")
            self._start(prepared, images)
            return
        except RequestError as reason:
            failure = Failure(str(reason), by_caller=True, code=getattr(reason, "code", None))
        except Exception as reason:  # a fault of ours: the others that are ready must not be lost with it
            # As text: the record of a traceback would keep the images.
            logger.error("request %s fails:\n%s", request_id, traceback.format_exc())
            failure = Failure(f"{type(reason).__name__}: {reason}", by_caller=False)
        self._core.refuse(self._inputs.unserved(prepared), failure)

    def _take_reprocessed(self, job: ReprocessJob, result: list[ProcessedImage] | RequestError) -> None:
        request, media = job.request, job.media
        if not self._core.runs(request):
            return
        if not isinstance(result, RequestError) and result[0].digest == media.item.digest:
            media.restore(result[0].pixels)
            return
        media.restore(None)
        place = request.media.index(media)
        what = result if isinstance(result, RequestError) else f"image {place} has changed since it was given"
        self._core.fail(request, RequestError(f"request {request.request_id}: {what}"))

    def close(self) -> None:
        """Stop the workers."""
        if self.preprocessor is not None:
            self.preprocessor.close()
