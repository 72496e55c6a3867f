"""Encodes images, videos and sounds, and keeps their features until the plans let go of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from quire.kernels.transfer import send
from quire.lora import AdapterSlots
from quire.models.base import CausalLM
from quire.models.vision.base import MediaModel
from quire.platform.scheduling.plan import EncodeImage


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
        """Encode the images whose features are not there, each by itself: together they would take as long, and their
        sums would depend on each other's number."""
        try:
            for image in images:
                if image.digest not in self.features:
                    self.features[image.digest] = self._encode(image, self._pixels[image.digest])
        finally:
            if self._pixels:
                self._pixels.clear()

    def _encode(self, image: EncodeImage, pixels: Mapping[str, torch.Tensor]) -> torch.Tensor:
        dtype = self._model.dtype
        if "prompt_embeds" in pixels:  # no image's: rows of a prompt, in the model's dtype
            return self._model.embed_given(send(pixels["prompt_embeds"], self._device))
        given = pixels.get("image_embeds")
        assert isinstance(self._model, MediaModel)
        inputs = {name: send(tensor, self._device) for name, tensor in pixels.items()}
        with nullcontext() if self._adapter_slots is None else self._adapter_slots.encoding_for(image.adapters):
            features = self._model.encode_media(image.kind, inputs) if given is None else given
        features = self._model.embed_given(features.to(self._device, dtype))
        if len(features) != image.length:
            raise RuntimeError(f"one {image.kind} has {len(features)} features, and {image.length} placeholders")
        return features.contiguous()
