"""Encodes images, videos and sounds, and keeps their features until the plans let go of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch

from quire.kernels.transfer import send
from quire.lora import AdapterSlots
from quire.models.base import CausalLM
from quire.models.vision.base import MediaModel
from quire.platform.scheduling.plan import EncodeImage

# Inputs that a caller has computed: rows of a prompt, features of an image.
_GIVEN = {"prompt_embeds", "image_embeds"}


class EncoderRunner:
    """The features of images, videos and sounds by their digests, each [length, E] in the model's dtype; with
    `feature_levels`, [length, E * (1 + levels)]."""

    def __init__(self, model: CausalLM, device: torch.device, adapter_slots: AdapterSlots | None = None) -> None:
        self.features: dict[bytes, torch.Tensor] = {}
        self._model = model
        self._device = device
        self._adapter_slots = adapter_slots
        self._pixels: dict[bytes, Mapping[str, torch.Tensor]] = {}  # of images to encode

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        """Have what an image of the next step is encoded from, until that step was started."""
        self._pixels[digest] = inputs

    def release(self, digests: Iterable[bytes]) -> None:
        """Let go of features."""
        for digest in digests:
            self.features.pop(digest, None)

    def run(self, images: Sequence[EncodeImage]) -> None:
        """Encode the images whose features are not there."""
        missing = {image.digest: image for image in images if image.digest not in self.features}
        try:
            for alike in self._alike(missing.values()):
                for image, features in zip(alike, self._encode(alike), strict=True):
                    self._keep(image, features)
        finally:
            if self._pixels:
                self._pixels.clear()

    def _alike(self, images: Iterable[EncodeImage]) -> Iterator[list[EncodeImage]]:
        """As many as the model may be given at once, of one shape, changed by the same adapters.

        Not on a GPU, where sums may depend on how many there are.
        """
        most = self._model.images_together if isinstance(self._model, MediaModel) and self._device.type == "cpu" else 1
        groups: dict[object, list[EncodeImage]] = {}
        for image in images:
            pixels = self._pixels[image.digest]
            alone = most == 1 or image.kind != "image" or not _GIVEN.isdisjoint(pixels)
            likeness = image.digest if alone else tuple((name, one.shape, one.dtype) for name, one in pixels.items())
            groups.setdefault((image.adapters, likeness), []).append(image)
        for group in groups.values():
            yield from (group[first : first + most] for first in range(0, len(group), most))

    def _encode(self, images: Sequence[EncodeImage]) -> Sequence[torch.Tensor]:
        """The features of images that are alike."""
        first = images[0]
        inputs = [self._on_device(self._pixels[image.digest]) for image in images]
        for name, tensor in inputs[0].items():
            if name in _GIVEN:
                return [tensor]
        model = self._model
        assert isinstance(model, MediaModel)
        with nullcontext() if self._adapter_slots is None else self._adapter_slots.encoding_for(first.adapters):
            if len(images) > 1:
                return model.encode_images(inputs)
            return [model.encode_media(first.kind, inputs[0])]

    def _on_device(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: send(tensor, self._device) for name, tensor in inputs.items()}

    def _keep(self, image: EncodeImage, features: torch.Tensor) -> None:
        if len(features) != image.length:
            raise RuntimeError(f"one {image.kind} has {len(features)} features, and {image.length} placeholders")
        given = self._model.embed_given(features.to(self._device, self._model.dtype))
        self.features[image.digest] = given.contiguous()
