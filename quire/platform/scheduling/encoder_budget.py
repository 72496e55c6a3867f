"""Which images a step encodes, and whose features sequences hold: within the step's tokens and the features' memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.multimodal import FeatureCache, Pixels
from quire.platform.kv.spans import uncut
from quire.platform.scheduling.plan import EncodeImage
from quire.platform.scheduling.plan_builder import PlanBuilder
from quire.platform.scheduling.request import MediaInput, Request, SequenceState


class EncoderBudget:
    """The account of images' features. A sequence holds those of an image from the step that first needs them until its
    last placeholder is computed.

    features: whose features the runner has. feature_bytes: of one placeholder's.
    pixels: of the images that the last plan encodes, by digest, until it is done.
    max_tokens: placeholders whose images one step encodes, but for a first image, which may have more.
    """

    def __init__(self, features: FeatureCache, feature_bytes: int, max_tokens: int) -> None:
        self.features = features
        self._feature_bytes = feature_bytes
        self._max_tokens = max_tokens
        self.pixels: dict[bytes, Pixels] = {}
        self._images_to_reprocess: list[tuple[Request, MediaInput]] = []

    def schedule_images(self, sequence: SequenceState, start: int, count: int, builder: PlanBuilder) -> int:
        """How many of the next `count` tokens can be computed: those before the first image that is not ready, and no
        part of a range whose tokens see one another.

        The features of the images among them are held from here on, and encoded in this step if they must be.
        """
        request = sequence.request
        end = uncut(request.sees, start + count)
        before = len(sequence.held), len(builder.encode)
        for media in request.media_in(start, end) if start < end else ():
            digest = media.item.digest
            if digest in sequence.held:
                if all(image.digest != digest for image in builder.encode):
                    media.drop_pixels()
            elif self._acquire_features(request, media, builder):
                sequence.held.append(digest)
            else:
                builder.waits = True
                end = uncut(request.sees, max(start, media.item.offset))
                if request.sees:
                    shown = request.media_in(start, end) if start < end else ()
                    self._let_go(sequence, {one.item.digest for one in shown}, *before, builder)
                break
        return end - start

    def _let_go(
        self, sequence: SequenceState, needed: Collection[bytes], held: int, encodes: int, builder: PlanBuilder
    ) -> None:
        """Take back what a sequence was given behind so many images, but for what it needs in this step: it computes
        them with an image that must wait, and until then others may have the room."""
        for digest in [one for one in sequence.held[held:] if one not in needed]:
            sequence.held.remove(digest)
            if any(image.digest == digest for image in builder.encode[encodes:]):
                builder.encode = [image for image in builder.encode if image.digest != digest]
                del builder.pixels[digest]
                self.features.discard(digest)
            else:
                self.features.release(digest)

    def _acquire_features(self, request: Request, media: MediaInput, builder: PlanBuilder) -> bool:
        """Hold an image's features; False: not in this step."""
        item = media.item
        if self.features.hold(item.digest):
            media.drop_pixels()
            return True
        if media.pixels is None:
            if media.ask_again():
                self._images_to_reprocess.append((request, media))
            return False
        # One image at least; no more than as many tokens as a step has, lest others wait too long for theirs.
        planned = sum(one.length for one in builder.encode)
        if builder.encode and planned + item.features > self._max_tokens:
            return False
        if not self.features.insert(item.digest, item.features * self._feature_bytes):
            return False
        mix = tuple((ref.uid, weight) for ref, weight in request.adapters if ref.visual)
        builder.encode.append(EncodeImage(item.digest, item.features, mix, item.kind))
        builder.pixels[item.digest] = media.pixels
        return True

    def used_encodes(self, builder: PlanBuilder) -> list[EncodeImage]:
        """The images to encode: not those for a sequence that was given their features and then got no blocks."""
        for image in builder.encode:
            if image.digest not in builder.used:
                self.features.discard(image.digest)
        used = [image for image in builder.encode if image.digest in builder.used]
        self.pixels = {image.digest: builder.pixels[image.digest] for image in used}
        return used

    def admitted(self, sequence: SequenceState) -> None:
        """What is in the cache of a sequence that was admitted need not be encoded."""
        for media in sequence.request.media_in(0, sequence.num_computed):
            if media.item.end <= sequence.num_computed:
                media.drop_pixels()

    def encoded(self, sequence: SequenceState, digests: set[bytes]) -> None:
        """A step has computed some of the sequence's placeholders, and encoded these images."""
        self.release_features(sequence, sequence.num_computed)
        for media in sequence.request.media:
            if media.item.digest in digests:
                media.drop_pixels()

    def release_features(self, sequence: SequenceState, computed: int) -> None:
        """Release the features of all images but one that is computed half-way.

        Not even those that come again: holding them, the sequence might wait for room that it takes itself.
        """
        if sequence.held:
            items = [media.item for media in sequence.request.media]
            needed = {item.digest for item in items if item.offset < computed < item.end}
            for digest in [one for one in sequence.held if one not in needed]:
                self.features.release(digest)
                sequence.held.remove(digest)

    def forget(self, digests: Iterable[bytes], sequences: Iterable[SequenceState]) -> None:
        """The runner has none of these features after all: encoding them has failed."""
        holders = list(sequences)
        for digest in digests:
            self.features.discard(digest)
            for sequence in holders:
                if digest in sequence.held:
                    sequence.held.remove(digest)

    def take_images_to_reprocess(self) -> list[tuple[Request, MediaInput]]:
        """Images whose features and pixels are gone, to be prepared again: those since the last call."""
        images, self._images_to_reprocess = self._images_to_reprocess, []
        return images
