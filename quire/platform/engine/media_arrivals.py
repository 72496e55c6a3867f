"""Images on their way into the engine."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from quire.errors import ContextLengthError, RequestError
from quire.multimodal import MediaByUuid, MediaPreprocessor, NoRoomError, ProcessedImage
from quire.platform.engine.core import EngineCore
from quire.platform.inputs.prepared import PreparedRequest, ProcessedPrompt
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


def _made_with(prompt: ProcessedPrompt) -> Hashable:
    """What features depend on beside the media themselves."""
    settings = json.dumps(prompt.settings, sort_keys=True, default=repr)
    return settings, feature_variant(prompt.adapters, prompt.salt)


class MediaArrivals:
    """Requests whose images are being prepared by workers, and images that are prepared once more.

    preprocessor: None for a model that takes no images. start: queues a request whose images are ready.
    uuids: what is known of media by their names.
    waiting: the requests, by id. It belongs to the thread that steps.
    """

    def __init__(
        self,
        preprocessor: MediaPreprocessor | None,
        inputs: InputProcessor,
        core: EngineCore,
        start: Callable[[PreparedRequest, Sequence[ProcessedImage]], None],
        uuids: MediaByUuid,
    ) -> None:
        self.preprocessor = preprocessor
        self._uuids = uuids
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
        try:
            sources = self._uuids.resolve(prompt.images, prompt.salt, _made_with(prompt))
        except RequestError as error:
            raise RequestError(f"request {prepared.request_id}: {error}") from None
        features = self._core.scheduler.encoder.features
        sources = [
            one.source if isinstance(one, ProcessedImage) and one.digest not in features else one for one in sources
        ]
        self.preprocessor.submit(prepared, sources, prompt.settings, room=room, variant=variant)
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
                first=_place(request, media),
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
        request_id, prompt = prepared.request_id, prepared.prompt
        made = None if isinstance(images, RequestError) else images
        self._uuids.learn(prompt.images, prompt.salt, _made_with(prompt), made)
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
        place = _place(request, media)
        what = (
            result if isinstance(result, RequestError) else f"{media.item.kind} {place} has changed since it was given"
        )
        self._core.fail(request, RequestError(f"request {request.request_id}: {what}"))

    def close(self) -> None:
        """Stop the workers."""
        if self.preprocessor is not None:
            self.preprocessor.close()


def _place(request: Request, media: MediaInput) -> int:
    """Its place among those of its kind in the prompt."""
    return [one for one in request.media if one.item.kind == media.item.kind].index(media)
